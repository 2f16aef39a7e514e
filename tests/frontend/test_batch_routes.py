"""Files and batches at a frontend: who sees what, and what mistakes are told."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from frontend_service import Service, error_of, run_service, wait_until

from scheduler_svc.batches.database import SqliteDatabase
from scheduler_svc.batches.files import CHUNK_BYTES
from scheduler_svc.batches.store import Store
from tests.batches.stored import put_file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx.Client]:
    flags = ("--batch-dir", str(folder / "data"), "--batch-max-file-mb", "1", "--batch-max-tenant-mb", "2")
    with run_service(folder, *flags, "--stalled-client-s", "1", log=folder / "log") as service:
        yield service.client


def test_tenants_see_their_own_and_mistakes_are_named(client: httpx.Client) -> None:
    def upload(content: bytes, tenant: str = "a", **fields: str) -> httpx.Response:
        return client.post(
            "/v1/files",
            files={"file": ("x", content)},
            data={"purpose": "batch"} | fields,
            headers={"X-Tenant": tenant},
        )

    def create(tenant: str = "a", **fields: Any) -> httpx.Response:
        body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"} | fields
        return client.post("/v1/batches", json=body, headers={"X-Tenant": tenant})

    file = upload(b"{}", **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}).json()
    assert file["expires_at"] == file["created_at"] + 3600
    assert client.get(f"/v1/files/{file['id']}", headers={"X-Tenant": "b"}).status_code == 404
    assert client.get("/v1/files").json() == {
        "object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False
    }  # fmt: skip
    assert create("b").status_code == 404
    batch = create().json()
    for path in (f"/v1/batches/{batch['id']}", f"/v1/batches/{batch['id']}/cancel"):
        method = "POST" if path.endswith("cancel") else "GET"
        assert client.request(method, path, headers={"X-Tenant": "b"}).status_code == 404
        assert client.request(method, path.replace(batch["id"], "%00")).status_code == 404
    for answer, status, param in (
        (upload(b"x", purpose="fine-tune"), 400, "purpose"),
        (upload(b""), 400, "file"),
        (upload(b"x" * ((1 << 20) + 1)), 413, "file"),
        (client.post("/v1/files", json={}), 400, None),
        (client.get("/v1/files?limit=0"), 400, "limit"),
        (client.get("/v1/batches?limit=101"), 400, "limit"),
        (client.get("/v1/batches?after=%00"), 400, "after"),
        (create(endpoint="/v1/embeddings"), 400, "endpoint"),
        (create(completion_window="soon"), 400, "completion_window"),
        (create(completion_window="31d"), 400, "completion_window"),
        (create(metadata={"a": 1}), 400, "metadata"),
        (create(output_expires_after={"anchor": "created_at", "seconds": 1}), 400, "output_expires_after[seconds]"),
        (create(input_file_id="file-none"), 404, "id"),
        (create(input_file_id=None), 400, "input_file_id"),
    ):
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


def test_an_upload_that_stalls_or_breaks_off_leaves_nothing(client: httpx.Client) -> None:
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
    for length, status in ((2000, 408), (len(head), 400)):
        with socket.create_connection((client.base_url.host, client.base_url.port or 0), timeout=60) as connection:
            request = f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n"
            connection.sendall(request.encode() + b"Content-Type: multipart/form-data; boundary=b\r\n\r\n" + head)
            answer = b""
            while not answer.endswith(b"}"):
                answer += connection.recv(1000)
            assert answer.startswith(f"HTTP/1.1 {status}".encode()) and (status != 408 or b"client_timeout" in answer)
    assert client.get("/v1/files").json()["data"] == []


def test_a_tenant_stores_no_more_than_it_may(client: httpx.Client) -> None:
    def upload(size: int, tenant: str = "full") -> httpx.Response:
        files, headers = {"file": ("x", b"x" * size)}, {"X-Tenant": tenant}
        return client.post("/v1/files", files=files, data={"purpose": "batch"}, headers=headers)

    def refused(answer: httpx.Response) -> bool:
        error = error_of(answer, 413)
        return (error["param"], error["code"]) == ("file", "storage_quota_exceeded")

    whole = 1 << 20
    stored = [upload(whole).json()["id"], upload(whole).json()["id"]]
    assert refused(upload(whole)) and refused(upload(1))
    form = client.build_request("POST", "/v1/files", files={"file": ("x", b"x")}, data={"purpose": "batch"})
    head, body = {"X-Tenant": "full", "content-type": form.headers["content-type"]}, form.read()
    assert refused(client.post("/v1/files", content=iter([body]), headers=head)), "in chunks, of no known length"
    with socket.create_connection((client.base_url.host, client.base_url.port or 0), timeout=60) as connection:
        connection.sendall(
            f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nX-Tenant: full\r\nContent-Length: {whole}\r\n"
            "Content-Type: multipart/form-data; boundary=b\r\n\r\n".encode()
        )
        assert connection.recv(1000).startswith(b"HTTP/1.1 413"), "before any of it is sent"
    listed = client.get("/v1/files", headers={"X-Tenant": "full"}).json()["data"]
    assert sorted(file["id"] for file in listed) == sorted(stored)
    assert upload(whole, "other").status_code == 200
    assert client.delete(f"/v1/files/{stored[0]}", headers={"X-Tenant": "full"}).status_code == 200
    assert upload(whole).status_code == 200 and refused(upload(1))


def test_a_download_whose_file_is_deleted_meanwhile_breaks_off_and_is_one_line_in_the_log(
    client: httpx.Client, folder: Path
) -> None:
    database = SqliteDatabase(folder / "data")
    store, content = Store(database), b"x" * (3 * CHUNK_BYTES)
    half = put_file(store, content)
    results = put_file(store, content, batch_id="batch_1", outcome="completed")  # of lines that have gone
    with database.transaction() as cursor:
        cursor.execute("DELETE FROM chunks WHERE file_id = ? AND number > 0", (half.id,))
    database.close()
    for file in (half, results):
        with pytest.raises(httpx.TransportError):
            client.get(f"/v1/files/{file.id}/content")
    # The log has each request's own line after what it has to say of it.
    wait_until(lambda: (folder / "log").read_text().count("/v1/files/{file_id}/content") == 2)
    log = (folder / "log").read_text()
    assert log.count("a download breaks off") == 2 and "Traceback" not in log and "[error" not in log


def test_batches_are_off_unless_there_is_a_place_for_them(service: Service) -> None:
    assert error_of(service.get("/v1/batches"), 404)["code"] == "batches_off"
    assert error_of(service.client.post("/v1/files", files={"file": b"x"}), 404)["code"] == "batches_off"
