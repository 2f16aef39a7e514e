"""The cost model: its file, its presets, and that a fit finds what made the samples."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from scheduler_svc.simulator import cost_model
from scheduler_svc.simulator.cost_model import CostModel, CostModelError
from scheduler_svc.simulator.fitting import FitError, fit, non_negative_least_squares
from scheduler_svc.simulator.iteration import IterationSample, chunk_attention

MEMORY = (0.02, 1e-5, 1e-6, 2e-7, 0.0, 1e-5)
COMPUTE = (0.005, 1e-5, 2e-4, 0.0, 1e-8, 1e-5)


def samples(model: CostModel, count: int = 400, noise: float = 0.0) -> list[IterationSample]:
    random = np.random.default_rng(3)
    found = []
    for _ in range(count):
        decodes = int(random.integers(0, 64))
        chunk = int(random.integers(0, 512)) if random.random() < 0.5 else 0
        computed = int(random.integers(0, 2000))
        swapped = int(random.integers(0, 50)) if random.random() < 0.3 else 0
        work = (decodes, chunk, decodes * int(random.integers(10, 3000)), chunk_attention(computed, chunk), swapped)
        found.append(IterationSample(*work, seconds=model.seconds(*work) * random.lognormal(0, noise)))
    return found


def test_a_fit_recovers_a_linear_model() -> None:
    found = fit(samples(CostModel("line", (MEMORY,))))
    assert len(found.pieces) == 1
    assert found.pieces[0] == pytest.approx(MEMORY, rel=1e-3, abs=1e-12)
    assert found.num_samples == 400 and found.num_held_out == 80
    assert found.p90_error < 1e-4


def test_a_fit_recovers_a_roofline() -> None:
    model = CostModel("roofline", (MEMORY, COMPUTE))
    found = fit(samples(model))
    assert len(found.pieces) == 2 and found.p90_error < 0.01
    fitted = CostModel("fitted", found.pieces)
    for work in ((1, 0, 500, 0, 0), (0, 512, 0, chunk_attention(0, 512), 0), (60, 500, 90_000, 400_000, 10)):
        assert fitted.seconds(*work) == pytest.approx(model.seconds(*work), rel=0.02)


def test_noise_leaves_the_sum_right_and_shows_in_the_error() -> None:
    found = fit(samples(CostModel("line", (MEMORY,)), count=2000, noise=0.2))
    assert abs(found.total_error) < 0.05
    assert 0.08 < found.median_error < 0.2 < found.p90_error


def test_coefficients_are_never_negative() -> None:
    rows = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    assert non_negative_least_squares(rows, np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0])
    assert non_negative_least_squares(rows, np.array([1.0, 3.0, 5.0])) == pytest.approx([1.0, 2.0])
    assert non_negative_least_squares(rows, np.array([-1.0, -1.0, -1.0])) == pytest.approx([0.0, 0.0])


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(FitError, match="19 iterations"):
        fit(samples(CostModel("line", (MEMORY,)), count=19))


def test_the_larger_piece_counts_and_the_overhead_stands_apart() -> None:
    model = CostModel("roofline", (MEMORY, COMPUTE), overhead_s=1.0)
    assert model.seconds(0, 0, 0, 0, 0) == pytest.approx(0.02)
    assert model.seconds(0, 1000, 0, 0, 0) == pytest.approx(0.205)


def test_a_model_survives_its_file(tmp_path: Path) -> None:
    model = CostModel("m", (MEMORY, COMPUTE), 0.001, 0.002, {"source": "a test"}, {"blocks": 7})
    path = tmp_path / "m.json"
    path.write_text(model.to_json())
    assert cost_model.load(str(path)) == model


def test_presets_load_and_tell_their_error() -> None:
    assert "yi-34b-2xa100" in cost_model.presets()
    for name in cost_model.presets():
        model = cost_model.load(name)
        assert model.name == name
        assert model.fit["source"] and 0 < model.fit["median_error"] <= model.fit["p90_error"] < 0.5
        assert model.seconds(1, 0, 100, 0, 0) > 0
        assert model.seconds(0, 2048, 0, chunk_attention(0, 2048), 0) > model.seconds(0, 16, 0, 136, 0)


def test_yi_decodes_a_batch_in_about_the_published_time() -> None:
    model = cost_model.load("yi-34b-2xa100")
    assert model.seconds(64, 0, 64 * 1022, 0, 0) == pytest.approx(0.128, rel=0.1)
    assert model.seconds(0, 4096, 0, chunk_attention(0, 4096), 0) == pytest.approx(0.76, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"format": "other"}, "format: expected"),
        ({"pieces": []}, "pieces: expected a list"),
        ({"pieces": [3]}, "pieces[0]: expected an object"),
        ({"pieces": [{"fixed": 1}, {"fixt": 1}]}, "pieces[1]: unknown feature 'fixt'"),
        ({"pieces": [{"fixed": -1}]}, "pieces[0].fixed: expected a number of at least 0, got -1"),
        ({"pieces": [{"fixed": True}]}, "pieces[0].fixed: expected a number"),
        ({"overhead_s": "1"}, "overhead_s: expected a number"),
    ],
)
def test_a_file_that_cannot_be_used_names_its_field(tmp_path: Path, changes: dict[str, object], wanted: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(json.dumps({**json.loads(CostModel("m", (MEMORY,)).to_json()), **changes}))
    with pytest.raises(CostModelError) as caught:
        cost_model.load(str(path))
    assert str(caught.value).startswith(str(path)) and wanted in str(caught.value)


def test_neither_preset_nor_file(tmp_path: Path) -> None:
    with pytest.raises(CostModelError, match="neither a preset"):
        cost_model.load("h200")
    (tmp_path / "text").write_text("{")
    with pytest.raises(CostModelError, match="not JSON"):
        cost_model.load(str(tmp_path / "text"))
