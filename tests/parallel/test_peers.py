import jax
import pytest

from jaxlm.core.errors import CommandError, PeerLost
from jaxlm.parallel import peers
from jaxlm.parallel.cluster import ProcessSpec
from jaxlm.parallel.peers import Peers
from tests.parallel.service import Rank, Service


def test_a_process_alone_waits_for_nobody():
    alone = Peers()
    alone.barrier("here", 0.0)
    alone.agree("config", {"a": 1}, 0.0)
    assert alone.share("step", 3, 0.0) == 3
    assert alone.sign("stop", "")
    assert alone.signs() == {}
    alone.close()
    assert alone.is_first


class _Gone(Service):
    """A coordination service that takes values and gives none back, as its process has died."""

    def blocking_key_value_get(self, key, milliseconds):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect\nand more")

    wait_at_barrier = blocking_key_value_get


@pytest.mark.parametrize(
    ("wait", "what"),
    [
        (lambda rank: rank.barrier("save", 2), "not every rank reached 'save' within 2 s"),
        (lambda rank: rank.agree("config", {}, 2), "rank 0 did not send its config within 2 s"),
        (lambda rank: rank.share("step", 1, 2), "the first rank did not send its step within 2 s"),
        (lambda rank: rank.gather("digests", 1, 2), "rank 0 did not send its digests within 2 s"),
    ],
)
def test_a_rank_that_loses_the_coordinator_is_told_to_run_the_same_command(wait, what):
    with pytest.raises(PeerLost) as caught:
        wait(Rank(0, 2, _Gone()))
    assert str(caught.value.what) == what
    assert caught.value.why == "UNAVAILABLE: failed to connect"
    assert caught.value.fix == peers.RERUN_FIX


@pytest.mark.parametrize(
    ("text", "is_loss"),
    [
        ("UNKNOWN: Gloo all-reduce failed: Read error [127.0.0.1]: Connection reset by peer", True),
        ("UNKNOWN: Gloo all-reduce failed: Connection closed by peer", True),
        (
            "NCCL operation failed: remote process exited or there was a network error, aborted",
            True,
        ),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes", False),
        ("INTERNAL: CpuCallback error calling callback", False),
    ],
)
def test_a_loss_is_told_from_other_failures_of_a_computation(text, is_loss):
    from jax.errors import JaxRuntimeError

    assert peers.is_loss(JaxRuntimeError(text)) == is_loss
    assert not peers.is_loss(RuntimeError(text))


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("a", False)],
)
def test_loopback_is_known(host, is_loopback):
    assert peers._is_loopback(host) == is_loopback


def test_a_process_is_told_all_or_nothing_of_its_place():
    assert ProcessSpec() == ProcessSpec(coordinator=None, count=None, rank=None)
    with pytest.raises(CommandError) as caught:
        ProcessSpec(coordinator="127.0.0.1:1", rank=0)
    assert "--num_processes must be given too" in caught.value.what
    with pytest.raises(CommandError):
        ProcessSpec(coordinator="127.0.0.1:1", rank=2, count=2)


def test_the_differences_between_ranks_are_shown_by_name():
    lines = peers._diff(3, {"a": 1, "b": 2}, {"a": 1, "b": 5, "c": 6})
    assert lines == ["b: 2 on rank 0, 5 on rank 3", "c: nothing on rank 0, 6 on rank 3"]
