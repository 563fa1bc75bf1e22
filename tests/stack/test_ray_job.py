"""A cluster of its own, started as a user would, and a run submitted to it with `ray job submit`."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_cluster.run_folder.folder import RunFolder

ROOT = Path(__file__).parents[2]
RAY = str(Path(sys.executable).with_name("ray"))

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment in which Ray's commands reach a head node started for this test."""
    port, dashboard = free_port(), free_port()
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    environment.pop("RAY_ADDRESS", None)
    command = [RAY, "start", "--head", "--block", f"--port={port}", "--num-cpus=2"]
    command += ["--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", "--disable-usage-stats"]
    # The other tests' Ray is up on this machine too, and has Ray's default ports.
    command += [f"--dashboard-agent-listen-port={free_port()}", f"--ray-client-server-port={free_port()}"]
    command += [f"--metrics-export-port={free_port()}", f"--dashboard-agent-grpc-port={free_port()}"]
    log = open(tmp_path / "head.log", "w")
    head = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 240
        while not _answers(environment):
            assert head.poll() is None, (tmp_path / "head.log").read_text()
            assert time.monotonic() < deadline, "the head node's job server did not come up"
        yield environment
    finally:
        if head.poll() is None:
            # SIGTERM would let Ray wait for half a minute; its processes end with their parent.
            os.killpg(head.pid, signal.SIGKILL)
            head.wait(60)
        log.close()


def _answers(environment: dict[str, str]) -> bool:
    done = subprocess.run([RAY, "job", "list"], env=environment, capture_output=True, check=False)
    return done.returncode == 0


def test_a_job_trains_on_the_cluster_and_leaves_its_run_folder(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    words = ["configs/quickstart.yaml", f"run.dir={folder.path}", "run.steps=2", "model.supervised.steps=3"]
    words += ["batch.prompts_per_step=4", "eval.num_prompts=5", "log.progress=plain"]
    words += ["optimizer.warmup_steps=0", "model.supervised.warmup_steps=0"]
    submit = [RAY, "job", "submit", "--working-dir", str(ROOT), "--"]
    done = subprocess.run(
        [*submit, "python", "launch.py", "train", *words],
        env=cluster,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "step 2/2" in done.stdout
    assert [row["step"] for row in folder.read_metrics()] == [0, 1, 2]
    assert (folder.model / "model.safetensors").is_file()
