"""Which library reads an object store with less work: obstore or fsspec with s3fs?

    python -m benchmarks.stores

It needs obstore, s3fs and moto[server], which are in no extra together. A server of moto runs in a process of its own
on this machine; it is slower than any store, so the CPU time of the client is the figure to compare, not the rate.
"""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

LISTED, READ, BYTES, THREADS = 5000, 1000, 100_000, 16


def serve() -> tuple[subprocess.Popen[bytes], str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    for _ in range(200):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            time.sleep(0.1)
    return server, f"http://127.0.0.1:{port}"


def measure(what: str, work: Callable[[], int]) -> None:
    began, before = time.perf_counter(), sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    done = work()
    seconds, busy = time.perf_counter() - began, sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) - before
    print(f"{what:28} {done / seconds:9,.0f}/s   {1e6 * busy / done:7,.0f} µs of CPU each", flush=True)


def run_obstore(endpoint: str) -> None:
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        "bench",
        endpoint=endpoint,
        access_key_id="a",
        secret_access_key="b",
        region="us-east-1",
        client_options={"allow_http": True},
    )
    names = [f"images/{number:06d}.jpg" for number in range(LISTED)]
    with ThreadPoolExecutor(THREADS) as threads:
        measure(
            "obstore put",
            lambda: len(list(threads.map(lambda n: obstore.put(store, n, bytes(BYTES)), names[:READ]))),
        )
        list(threads.map(lambda n: obstore.put(store, n, b""), names[READ:]))
        for _ in range(3):
            measure("obstore list", lambda: len([*chain.from_iterable(obstore.list(store, "images"))]))
            measure(
                "obstore get",
                lambda: len(list(threads.map(lambda n: len(obstore.get(store, n).bytes()), names[:READ]))),
            )


def run_s3fs(endpoint: str) -> None:
    import s3fs

    files = s3fs.S3FileSystem(
        key="a",
        secret="b",
        endpoint_url=endpoint,
        client_kwargs={"region_name": "us-east-1"},
        use_listings_cache=False,
    )
    names = [f"bench/images/{number:06d}.jpg" for number in range(LISTED)]
    for _ in range(3):
        measure("s3fs list", lambda: len(files.find("bench/images", detail=True)))
        with ThreadPoolExecutor(THREADS) as threads:
            measure("s3fs get", lambda: len(list(threads.map(files.cat_file, names[:READ]))))
        measure("s3fs get, all in one call", lambda: len(files.cat(names[:READ], batch_size=THREADS)))


def main() -> None:
    server, endpoint = serve()
    try:
        import boto3

        os.environ |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(Bucket="bench")
        run_obstore(endpoint)
        run_s3fs(endpoint)
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
