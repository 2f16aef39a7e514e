"""A small program, run once where kernels are loaded: they must compute what torch computes before they are trusted."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.native.library import LOGITS, Batch, Kind, Library, Op
from kernels.rms_norm import rms_norm_reference

_INPUTS, _OUTPUTS, _TOKENS = 72, 100, 7


def self_check(library: Library) -> bool:
    """Whether an embedding, a norm and a linear layer of odd sizes come out as in torch, within rounding."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(library.dtype)

    embedding, norm, weight = random(_TOKENS, _INPUTS), random(_INPUTS), random(_OUTPUTS, _INPUTS)
    packed = [torch.empty(library.packed_size(*part.shape), dtype=library.dtype) for part in (embedding, weight)]
    for part, target in zip((embedding, weight), packed, strict=True):
        library.pack(part, target)
    rows = torch.arange(_TOKENS)
    logits = torch.empty(_TOKENS, _OUTPUTS)
    embed = Op(kind=Kind.EMBED, output=0, n=_TOKENS, k=_INPUTS, scale=1.0, weight=packed[0].data_ptr())
    normed = Op(kind=Kind.NORM, input=0, output=1, count=1, k=_INPUTS, eps=1e-6, weight=norm.data_ptr())
    linear = Op(kind=Kind.LINEAR, input=1, output=LOGITS, n=_OUTPUTS, k=_INPUTS, scale=1.0, weight=packed[1].data_ptr())
    program = library.program([embed, normed, linear], [_INPUTS, _INPUTS])
    pointers = {"token_ids": rows.data_ptr(), "logits": logits.data_ptr()}
    program.run(Batch(tokens=_TOKENS, taken=_TOKENS, threads=torch.get_num_threads(), **pointers))
    expected = F.linear(rms_norm_reference(embedding, norm, 1e-6).float(), weight.float())
    tolerance = 1e-5 if library.dtype == torch.float32 else 1e-2
    return bool(torch.allclose(logits, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())))
