from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardproof.fleet import cleanup, make_scratch, remove_scratch, scratch_root
from shardproof.fleet.cleanup import record_token, remove_tree, sweep
from shardproof.fleet.processes import TOKEN_VARIABLE, Ident, identify
from shardproof.fleet.processes import alive as process_alive

OWNER = """
import os, signal, sys
from pathlib import Path
from shardproof.fleet import make_scratch
# A shell that starts tests in the background has them ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
print(make_scratch(root=Path(sys.argv[1])), flush=True)
signal.pause()
"""


class Owner:
    """Another process with a scratch directory."""

    def __init__(self, root: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(root)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(cleanup.__file__).parents[2])},
        )
        assert self.process.stdout is not None
        self.path = Path(self.process.stdout.readline().strip())

    def end(self, number: int) -> None:
        self.process.send_signal(number)
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    other = Owner(tmp_path)
    yield other
    other.end(signal.SIGKILL)


def test_a_scratch_directory_is_private_and_goes_away(tmp_path: Path) -> None:
    path = make_scratch(root=tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert path.parent == tmp_path
    (path / "deep" / "er").mkdir(parents=True)
    remove_scratch(path)
    assert list(tmp_path.iterdir()) == []
    remove_scratch(path)


def test_no_two_are_the_same(tmp_path: Path) -> None:
    paths = {make_scratch(root=tmp_path) for _ in range(3)}
    assert len(paths) == 3  # none took another, which is this same process's, for a dead one
    for path in paths:
        remove_scratch(path)


def test_a_dead_run_is_swept_at_the_next_start(owner: Owner, tmp_path: Path) -> None:
    owner.end(signal.SIGKILL)
    assert owner.path.exists()
    path = make_scratch(root=tmp_path)
    assert list(tmp_path.iterdir()) == [path]
    remove_scratch(path)


def test_a_running_one_is_left_alone(owner: Owner, tmp_path: Path) -> None:
    assert sweep(tmp_path) == []
    assert owner.path.exists()


def test_a_normal_end_leaves_nothing(owner: Owner, tmp_path: Path) -> None:
    owner.end(signal.SIGINT)  # an exception that nobody catches
    assert list(tmp_path.iterdir()) == []


def test_what_still_runs_under_a_dead_runs_token_is_killed(owner: Owner, tmp_path: Path) -> None:
    record_token(owner.path, "a-token-of-this-test")
    left = subprocess.Popen(
        ["sleep", "1000"], env={TOKEN_VARIABLE: "a-token-of-this-test"}, start_new_session=True
    )
    other = subprocess.Popen(["sleep", "1000"], env={TOKEN_VARIABLE: "another"})
    try:
        assert sweep(tmp_path) == []
        assert left.poll() is None
        owner.end(signal.SIGKILL)
        assert sweep(tmp_path) == [owner.path]
        assert left.wait() == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (left, other):
            process.kill()
            process.wait()


def test_a_file_system_without_locks_goes_by_process_and_start_time(
    owner: Owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert sweep(tmp_path) == []
    owner.end(signal.SIGKILL)
    assert sweep(tmp_path) == [owner.path]


def test_links_and_strangers_are_left_alone(tmp_path: Path) -> None:
    """The root is writable by everybody, so a name proves nothing."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (tmp_path / f"shardproof-{os.getuid()}-0123456789abcdef").symlink_to(precious)
    (tmp_path / f"shardproof-{os.getuid() + 1}-0123456789abcdef").mkdir()
    (tmp_path / f"shardproof-{os.getuid()}-file").touch()
    assert sweep(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 4


def test_one_that_never_got_its_name_is_swept_when_it_is_old(tmp_path: Path) -> None:
    unnamed = tmp_path / f".new-shardproof-{os.getuid()}-0123456789abcdef"
    unnamed.mkdir()
    assert sweep(tmp_path) == []
    os.utime(unnamed, (0, 0))
    assert sweep(tmp_path) == [unnamed]


def test_a_forked_child_does_not_remove_its_parents_directory(tmp_path: Path) -> None:
    path = make_scratch(root=tmp_path)
    child = os.fork()
    if child == 0:
        remove_scratch(path)
        os._exit(0)
    os.waitpid(child, 0)
    assert path.exists()
    remove_scratch(path)


def test_directories_without_permissions_are_removed(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "closed" / "inner").mkdir(parents=True)
    (tree / "closed" / "inner" / "file").touch()
    (tree / "closed").chmod(0)
    remove_tree(tree)
    assert not tree.exists()


def test_little_shared_memory_is_not_used() -> None:
    assert scratch_root(room=0) == Path("/dev/shm")
    assert scratch_root(room=2**60) == Path(tempfile.gettempdir())


def test_identity_tells_a_process_from_a_later_one_of_its_number() -> None:
    me = identify(os.getpid())
    assert me is not None
    assert process_alive(me)
    assert not process_alive(Ident(me.pid, me.started - 1))
