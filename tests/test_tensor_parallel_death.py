"""A rank that dies in the middle of generate(): torchrun ends the others, and says which it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import forked
import pytest
import two_ranks

WORKER = Path(__file__).with_name("dying_rank_worker.py")


@pytest.mark.parametrize(("way", "words"), [("killed", "SIGKILL"), ("raises", "what rank 1 says")])
def test_the_death_of_a_rank_ends_all_with_a_message(way, words, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = forked.shared_environment() | two_ranks.GLOO
    with subprocess.Popen(
        [*command, WORKER, way, tmp_path / "model"], env=environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=200)  # a rank that waits for the dead one would wait for 30 minutes
        finally:
            two_ranks.end(process)
    assert process.returncode == 1, output
    assert "rank 1 ends here" in output
    assert words in output
    assert "rank      : 1 (local_rank: 1)" in output  # in torchrun's table of failures
    assert "nobody comes here" not in output
