"""Two processes under torchrun."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLES = re.compile("RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*")
LIMIT = 240  # seconds that a run may take on a machine that is busy with others


@contextmanager
def torchrun(folder: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start two processes that print to a file, and leave none behind, however the test ends."""
    environment = {
        name: value for name, value in os.environ.items() if not VARIABLES.fullmatch(name)
    }
    helpers = str(Path(__file__).parent)
    path = os.pathsep.join(filter(None, [helpers, environment.get("PYTHONPATH")]))
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    options = [
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        "--local-addr=127.0.0.1",
    ]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *options,
        "--monitor-interval=0.1",
        *words,
    ]
    with (folder / "printed.txt").open("wb") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        if process.poll() is None:
            # Each worker has a session of its own, and would outlive torchrun.
            workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            process.kill()
            process.wait()
            for worker in workers:
                os.kill(int(worker), signal.SIGKILL)


def run(folder: Path, *words: str, limit: float = LIMIT) -> tuple[int, str]:
    """Run two processes to their end, and return the exit code and what was printed."""
    with torchrun(folder, *words) as process:
        code = process.wait(limit)
    return code, (folder / "printed.txt").read_text()
