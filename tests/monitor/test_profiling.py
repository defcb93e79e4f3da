"""Traces of each kind of machine, written by hand in the form that JAX writes them."""

import gzip
import json

import jax.numpy as jnp
import pytest

from jaxlm.monitor import profiling
from jaxlm.monitor.config import ProfileConfig
from jaxlm.monitor.profiling import Trace
from jaxlm.parallel import hlo


def lane(pid, process, tid, thread):
    return [
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": process}},
        {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": thread}},
    ]


def span(pid, tid, name, begin, end, **args):
    return dict(ph="X", pid=pid, tid=tid, name=name, ts=begin, dur=end - begin, args=args)


LOOP = [
    *lane(1, "/host:CPU", 1, "python"),
    span(1, 1, "jaxlm data", 0, 30),
    span(1, 1, "jaxlm step", 30, 100),
]


def tell(name):
    return (*hlo.operation_by_name(name), name.startswith("known"))


def shares(tmp_path, events):
    path = tmp_path / "host.trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    summary = profiling.summary(profiling.newest_trace(tmp_path), tell)
    assert sum(summary["shares"].values()) == pytest.approx(1)
    return summary, {kind: round(share, 3) for kind, share in summary["shares"].items() if share}


def test_each_moment_goes_to_what_runs_in_it(tmp_path):
    """On a CPU: two threads at once, a loop around one, and events that are no operations."""
    events = [
        *LOOP,
        span(1, 2, "dot.1", 40, 60, hlo_op="dot.1"),
        span(1, 3, "all-reduce.2", 50, 70, hlo_op="all-reduce.2"),
        span(1, 2, "while.3", 40, 90, hlo_op="while.3"),
        span(1, 2, "ThunkExecutor::Execute", 40, 90),
    ]
    summary, parts = shares(tmp_path, events)
    assert parts == {"matmul": 0.15, "communication": 0.15, "data_wait": 0.3, "python": 0.4}
    assert (summary["seconds"], summary["steps"]) == (pytest.approx(1e-4), 1)
    assert [each["name"] for each in summary["operations"]] == ["dot.1", "all-reduce.2"]
    assert summary["not_told"][0].startswith("2 of 2 operations are not in the step's program")


def test_the_device_waits_for_data_only_while_it_runs_nothing(tmp_path):
    events = [*LOOP, span(1, 2, "known", 10, 100, hlo_op="known")]
    summary, parts = shares(tmp_path, events)
    assert parts == {"other": 0.9, "data_wait": 0.1}
    assert summary["not_told"][0].startswith("0 of 1 ")


def test_a_gpu_has_streams_and_lanes_that_repeat_them(tmp_path):
    events = [
        *LOOP,
        *lane(2, "/device:GPU:0", 7, "Stream #7(Compute)"),
        *lane(2, "/device:GPU:0", 8, "XLA Ops"),
        span(2, 7, "nvjet_tst_128x256", 20, 60, hlo_op="gemm_fusion_dot.5"),
        span(2, 7, "cudnn_generated_fort_native_sdpa_flash", 60, 80),
        span(2, 7, "ncclDevKernel_AllReduce_Sum", 80, 90),
        span(2, 7, "MemcpyD2H", 90, 100),
        span(2, 8, "gemm_fusion_dot.5", 0, 100),
        span(1, 4, "launch", 0, 100, hlo_op="gemm_fusion_dot.5"),
    ]
    summary, parts = shares(tmp_path, events)
    assert parts == {
        "matmul": 0.4, "attention": 0.2, "communication": 0.1, "other": 0.1, "data_wait": 0.2,
    }  # fmt: skip
    assert summary["operations"][0]["name"] == "gemm_fusion_dot.5"
    assert "ran on devices" in summary["not_told"][1]


def test_the_kernels_of_a_cuda_graph_keep_their_names(tmp_path):
    events = [
        *LOOP,
        *lane(2, "/device:GPU:0", 7, "Stream #14(Compute,Memset)"),
        span(2, 7, "nvjet_sm90_tst_128x128_64x6_2x1_v_bz_NNT", 0, 50, hlo_op="command_buffer_12"),
        span(2, 7, "loop_add_fusion_2", 50, 70, hlo_op="command_buffer_12"),
        span(2, 7, "cudnn_generated_fort_native_sdpa_sm90_flash", 70, 100, hlo_op="command_buffer"),
    ]
    summary, parts = shares(tmp_path, events)
    assert parts == {"matmul": 0.5, "attention": 0.3, "other": 0.2}
    assert [each["name"] for each in summary["operations"]][-1] == "loop_add_fusion_2"


def test_a_tpu_has_one_lane_of_operations(tmp_path):
    events = [
        *lane(2, "/device:TPU:0", 1, "Steps"),
        *lane(2, "/device:TPU:0", 2, "XLA Modules"),
        *lane(2, "/device:TPU:0", 3, "XLA Ops"),
        span(2, 1, "0", 0, 100),
        span(2, 2, "jit_step", 0, 100),
        span(2, 3, "convolution.1", 0, 60),
        span(2, 3, "splash_mha_fwd", 60, 90),
        span(2, 3, "all-gather-done.3", 90, 100),
    ]
    summary, parts = shares(tmp_path, events)
    assert parts == {"matmul": 0.6, "attention": 0.3, "communication": 0.1}
    assert any("does not contain the loop" in line for line in summary["not_told"])


def test_what_cannot_be_read_is_said_as_one_error(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="no .*trace.json.gz"):
        profiling.newest_trace(tmp_path)
    with pytest.raises(ValueError, match="no operation"):
        shares(tmp_path, LOOP)
    path = tmp_path / "host.trace.json.gz"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ValueError, match="EOFError"):
        profiling.summary(path, tell)
    path.write_bytes(gzip.compress(b"[]"))
    with pytest.raises(ValueError, match="TypeError"):
        profiling.summary(path, tell)
    monkeypatch.setattr(profiling, "MAX_EVENTS", 4)
    summary, _ = shares(tmp_path, [*LOOP, span(1, 2, "dot", 0, 9, hlo_op="dot")])
    assert "the file ends there" in summary["not_told"][-1]


def run(trace, steps):
    for step in range(steps):
        trace.before(step)
        jnp.ones(8).sum().block_until_ready()
    trace.close()


def test_the_window_leaves_a_trace_and_says_so_once(tmp_path):
    output = []
    run(Trace(ProfileConfig(steps="2:4"), tmp_path, lambda: output.append(1)), 6)
    assert list(tmp_path.rglob("*.xplane.pb"))
    assert output == [1]


def test_a_run_that_ends_inside_the_window_still_leaves_one(tmp_path):
    run(Trace(ProfileConfig(steps="2:52"), tmp_path), 4)
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_no_steps_trace_nothing(tmp_path):
    run(Trace(ProfileConfig(), tmp_path), 20)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["3", "5:5", "6:5", ":5", "5:", "a:b", "-1:3", "1:2:3", ""])
def test_a_window_without_a_step_is_refused_and_explained(text):
    ((name, problem, fix),) = ProfileConfig(steps=text).problems()
    assert name == "steps"
    assert repr(text) in problem
    assert fix == "jaxlm config explain profile.steps"
