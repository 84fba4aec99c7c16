"""What the planner says of ways that spare gathers of parameters, against figures by hand."""

from __future__ import annotations

import dataclasses

import pytest

from loco_fsdp import LoCoConfig
from loco_fsdp.plan import main, recommend, report
from loco_fsdp.planning.cluster import FRAMEWORKS, Cluster, Job
from loco_fsdp.planning.cost_model import measurable_calls, predict, predict_all
from loco_fsdp.planning.ways import collectives_of_unit

NUMEL = 6 * 2**16  # each of its 6 shards is 256 blocks of 256 elements
W8, W4 = 1.015625, 0.515625  # bytes: a code, and the 256th of a scale of 4 bytes

# 3 nodes of 2 ranks, 4 microbatches, 5 units. No two rates or latencies are alike.
CLUSTER = Cluster(
    num_nodes=3,
    ranks_per_node=2,
    inter_bandwidth=3e9,
    intra_bandwidth=7e9,
    codec_rate=5e9,
    codec_latency_s=1e-3,
    latency_s=1e-4,
    wait_s=1e-5,
)
JOB = Job(num_parameters=NUMEL, compute_s=0.1, num_units=5, microbatches=4, overlap=0.0)
SINGLE = dataclasses.replace(CLUSTER, ranks_per_node=1)
ONE_NODE = dataclasses.replace(CLUSTER, num_nodes=1)

GPUS = Cluster(num_nodes=4, ranks_per_node=8, inter_bandwidth=100e9, intra_bandwidth=2.4e12)
LARGE = Job(num_parameters=8_000_000_000, compute_s=0.5)

RESHARD, INT8, DIFFERENCES = NEW = (
    "loco-hierarchical-reshard",
    "loco-int8",
    "loco-differences",
)
STOCK_RESHARD = "fsdp-bf16-reshard"


# Bytes


@pytest.mark.parametrize(
    ("way", "between_nodes", "by_a_rank"),
    [
        # A ring of 6 ranks, in the forward and in the backward of 4 microbatches.
        ("loco-hierarchical", 2 * 4 * 2 * NUMEL * 5 / 6, 2 * 4 * 2 * NUMEL * 5 / 6),
        # The backward gathers half of 2 bytes from the other rank of the node.
        (RESHARD, 4 * 2 * NUMEL * 5 / 6, 4 * 2 * NUMEL * 5 / 6 + 4 * NUMEL),
        # A rank gathers codes of its half of the parameters over 3 nodes, then the other half.
        (
            INT8,
            4 * W8 * NUMEL * 2 / 3,
            4 * (W8 * NUMEL / 2 * 2 / 3 + W8 * NUMEL / 2 + NUMEL),
        ),
        # Codes once, of the half again; 8 gathers inside.
        (DIFFERENCES, W4 * NUMEL * 2 / 3, W4 * NUMEL / 2 * 2 / 3 + 8 * NUMEL),
    ],
)
def test_bytes_of_parameters(way: str, between_nodes: float, by_a_rank: float) -> None:
    predicted = predict(way, CLUSTER, JOB)
    gradient = W4 * NUMEL * 2 / 3
    assert predicted.reduce_inter_node_bytes == pytest.approx(gradient)
    assert predicted.inter_node_bytes == pytest.approx(gradient + between_nodes)
    # Gradients in float32 inside of the node; then a rank sends two thirds of the codes of a half.
    assert predicted.rank_bytes == pytest.approx(by_a_rank + 4 * NUMEL / 2 + gradient / 2)


def test_stock_reshard_spares_half_of_the_gathers_and_reduces_as_stock_does() -> None:
    stock, reshard = (predict(way, CLUSTER, JOB) for way in ("fsdp-bf16", STOCK_RESHARD))
    # Rings of 6 ranks: gradients once, and parameters in the forward of 4 microbatches.
    assert reshard.reduce_inter_node_bytes == pytest.approx(2 * NUMEL * 5 / 6)
    assert reshard.inter_node_bytes == pytest.approx((1 + 4) * 2 * NUMEL * 5 / 6)
    assert reshard.rank_bytes == pytest.approx((1 + 4) * 2 * NUMEL * 5 / 6 + 4 * NUMEL)
    assert reshard.reduce_s == stock.reduce_s
    assert reshard.gather_s == predict(RESHARD, CLUSTER, JOB).gather_s
    assert reshard.state_bytes == pytest.approx((16 / 6 + 2 / 2) * NUMEL)
    assert reshard.error_bytes_per_parameter == 0


def test_one_rank_a_node_gathers_codes_over_all_ranks() -> None:
    single = predict(INT8, SINGLE, JOB)
    gathered = 2 * 4 * W8 * NUMEL * 2 / 3
    assert single.inter_node_bytes - single.reduce_inter_node_bytes == pytest.approx(gathered)
    exact = predict("loco-hierarchical", SINGLE, JOB)
    assert single.state_bytes == exact.state_bytes  # nothing is kept
    assert single.reduce_s == exact.reduce_s


@pytest.mark.parametrize(
    ("way", "gathers"),
    [
        *((way, 4) for way in ("fsdp-bf16", "loco-flat", "hsdp-bf16", "hsdp-loco")),
        *(("megatron-bf16", 1), ("megatron-instances-loco", 1), ("ddp-loco", 1)),
    ],
)
def test_fsdp_gathers_in_each_microbatch_and_others_once(way: str, gathers: int) -> None:
    one, four = (
        predict(way, CLUSTER, dataclasses.replace(JOB, microbatches=count)) for count in (1, 4)
    )
    assert four.reduce_inter_node_bytes == one.reduce_inter_node_bytes
    assert four.reduce_s == one.reduce_s
    assert four.gather_s == pytest.approx(gathers * one.gather_s)
    assert four.step_s - four.gather_s == pytest.approx(one.step_s - one.gather_s)


# Seconds


def test_seconds_of_gathers() -> None:
    between, inside = 8 / 3e9, 8 / 7e9  # seconds of a byte of a node, and of a rank in its node
    call, message = 5 * 1e-5, 5 * 1e-4  # in all units: to wait for one call, and to send a message
    # A ring of 6 ranks has 5 messages in a row. 4 calls are over all ranks, 4 inside of the node.
    resharded = 4 * (2 * NUMEL * 5 / 6 * between + 5 * message + NUMEL * inside) + 8 * call
    # A ring of 3 nodes has 2 messages. A rank encodes a sixth, and decodes all.
    int8 = 4 * (W8 * NUMEL * 2 / 3 * between + 2 * message + (W8 / 2 + 1) * NUMEL * inside)
    int8 += 12 * call + 4 * (4 * (0.75 / 6 + 0.25) * NUMEL / 5e9 + 5 * 1e-3)
    # Once in a step a rank encodes a sixth, and decodes the half that it keeps.
    differences = W4 * NUMEL * 2 / 3 * between + 2 * message + 8 * NUMEL * inside + 9 * call
    differences += 4 * (0.75 / 6 + 0.25 / 2) * NUMEL / 5e9 + 5 * 1e-3
    exact = predict("loco-hierarchical", CLUSTER, JOB)
    for way, seconds in zip(NEW, (resharded, int8, differences), strict=True):
        predicted = predict(way, CLUSTER, JOB)
        assert predicted.gather_s == pytest.approx(seconds)
        assert predicted.reduce_s == exact.reduce_s
        assert predicted.step_s == pytest.approx(0.1 + seconds + exact.reduce_s)


def test_one_rank_a_node_encodes_and_decodes_for_each_gather() -> None:
    free = dataclasses.replace(SINGLE, codec_rate=1e30, codec_latency_s=0.0)
    codec_s = predict(INT8, SINGLE, JOB).gather_s - predict(INT8, free, JOB).gather_s
    assert codec_s == pytest.approx(8 * (4 * (0.75 / 3 + 0.25) * NUMEL / 5e9 + 5 * 1e-3))


def test_probes_measure_what_new_ways_call() -> None:
    """The bytes of a call are those of a unit, whatever the number of microbatches."""
    unit = NUMEL // 4
    for microbatches in (1, 4):
        job = dataclasses.replace(JOB, num_units=4, microbatches=microbatches)
        calls = {
            call.scope: sizes
            for call, sizes in measurable_calls(CLUSTER, job).items()
            if call.collective == "all-gather"
        }
        assert calls == {
            "all": [2 * unit],
            "across": [int(W4 * unit / 2), int(W8 * unit / 2)],
            "node": [int(W8 * unit), 2 * unit],
        }
        assert collectives_of_unit(job) == 2 * microbatches + 1
    scopes = {call.scope for call in measurable_calls(ONE_NODE, JOB)}
    assert scopes == {"all"}


def test_measured_gathers_take_the_place_of_bandwidths() -> None:
    rates = {
        "all-gather uint8 across": (1e-3, 2e9),
        "all-gather uint8 node": (3e-3, 5e9),
        "all-gather uint8 all": (7e-3, 1e9),
    }
    cluster = dataclasses.replace(
        CLUSTER, rates=rates, wait_s=0.0, codec_rate=1e30, codec_latency_s=0.0
    )
    for way, seconds in (
        (RESHARD, 4 * (5 * 7e-3 + 2 * NUMEL / 1e9 + 5 * 3e-3 + 2 * NUMEL / 5e9)),
        (INT8, 4 * (5 * 1e-3 + W8 * NUMEL / 2 / 2e9 + 10 * 3e-3 + (W8 + 2) * NUMEL / 5e9)),
        (DIFFERENCES, 5 * 1e-3 + W4 * NUMEL / 2 / 2e9 + 8 * (5 * 3e-3 + 2 * NUMEL / 5e9)),
    ):
        assert predict(way, cluster, job=JOB).gather_s == pytest.approx(seconds)


# Memory


@pytest.mark.parametrize("way", NEW)
@pytest.mark.parametrize(("dtype", "kept"), [("bfloat16", 2 / 2), ("float32", 4 / 2)])
def test_each_node_keeps_the_parameters(way: str, dtype: str, kept: float) -> None:
    job = dataclasses.replace(JOB, param_dtype=dtype, loco=LoCoConfig(error_dtype="float16"))
    predicted = predict(way, CLUSTER, job)
    errors = (2 + 4 / 256) / 2
    assert predicted.error_bytes_per_parameter == pytest.approx(errors)
    assert predicted.state_bytes == pytest.approx((16 / 6 + errors + kept) * NUMEL)


def test_a_model_of_70_billion_parameters_on_64_nodes_of_eight() -> None:
    cluster = Cluster(num_nodes=64, ranks_per_node=8, inter_bandwidth=400e9)
    job = Job(num_parameters=70_000_000_000, compute_s=10.0, microbatches=4)
    memory = {
        "fsdp-bf16": 2.19e9,
        "loco-hierarchical": 19.8e9,
        **dict.fromkeys(NEW, 37.3e9),
        "hsdp-loco": 158e9,
    }
    for way, num_bytes in memory.items():
        assert predict(way, cluster, job).state_bytes == pytest.approx(num_bytes, rel=0.01)
    for way, num_bytes in (("fsdp-bf16", 1258e9), (DIFFERENCES, 71e9)):
        assert predict(way, cluster, job).inter_node_bytes == pytest.approx(num_bytes, rel=0.02)


# Where they cannot be


def listed(cluster: Cluster) -> list[str]:
    return [prediction.way for prediction in predict_all(cluster, JOB)]


def test_ways_that_cannot_be_are_not_listed() -> None:
    assert listed(CLUSTER) == [*FRAMEWORKS["fsdp2"]]
    for cluster, refused in (
        (ONE_NODE, (STOCK_RESHARD, *NEW)),
        (SINGLE, (STOCK_RESHARD, RESHARD, DIFFERENCES)),
    ):
        assert listed(cluster) == [way for way in FRAMEWORKS["fsdp2"] if way not in refused]


@pytest.mark.parametrize(
    ("way", "cluster", "message"),
    [
        *((way, ONE_NODE, f"way='{way}' .* there is one node: use loco-flat") for way in NEW),
        (RESHARD, SINGLE, f"way='{RESHARD}' .* one rank each: use loco-int8, or loco-hierarchical"),
        (DIFFERENCES, SINGLE, f"way='{DIFFERENCES}' .* one rank each: use loco-int8"),
        (STOCK_RESHARD, ONE_NODE, f"way='{STOCK_RESHARD}' .* there is one node: use fsdp-bf16"),
        (STOCK_RESHARD, SINGLE, f"way='{STOCK_RESHARD}' .* one rank each: use fsdp-bf16"),
    ],
)
def test_asked_for_by_name_they_are_refused(way: str, cluster: Cluster, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predict(way, cluster, JOB)


# What is recommended


def advice(cluster: Cluster, job: Job, ways: tuple[str, ...] = FRAMEWORKS["fsdp2"]) -> str:
    return recommend([predict(way, cluster, job) for way in ways], cluster, job)


STOCK = ("fsdp-fp32", "fsdp-bf16")


@pytest.mark.parametrize(
    ("ways", "expected"),
    [
        ((*STOCK, RESHARD), " Set reshard_after_forward=8, which keeps 2 GB of parameters a rank."),
        (
            (*STOCK, INT8),
            " Set LoCoConfig(weight_bits=8) and reshard_after_forward=8, which keeps 2 GB of ",
        ),
        ((*STOCK, DIFFERENCES), " Set LoCoConfig(weight_bits=4), which keeps 2 GB of parameters "),
    ],
)
def test_recommendation_says_what_to_set_and_what_it_keeps(
    ways: tuple[str, ...], expected: str
) -> None:
    text = advice(GPUS, LARGE, ways)
    assert text.startswith(f"Use {ways[-1]}: ")
    assert expected in text
    assert ("off by default" in text) == (ways[-1] != RESHARD)


def test_stock_reshard_is_compared_with_and_recommended_with_what_to_set() -> None:
    # Between nodes 31 of 32 parts of 16 GB of parameters, and of gradients; inside of them 7 of 8.
    # Before the same gathers LoCo sends three quarters of the codes of gradients, after 32 GB of
    # them in the node, and passes an eighth of these through the codec.
    gathers_s = 8 * 16 * 31 / 32 / 100 + 8 * 16 * 7 / 8 / 2400
    stock_s = gathers_s + 8 * 16 * 31 / 32 / 100
    loco_s = gathers_s + 8 * 8 * W4 * 3 / 4 / 100 + 8 * 32 * 7 / 8 / 2400 + 32 / 8 / 500
    text = advice(GPUS, LARGE, (*STOCK, STOCK_RESHARD, RESHARD))
    assert f"{stock_s / loco_s:.2f}x as fast as {STOCK_RESHARD}, the fastest stock way" in text
    kept = " Set reshard_after_forward=8, which keeps 2 GB of parameters a rank."
    hidden = dataclasses.replace(LARGE, compute_s=2.5)  # less than the ring with both gathers
    text = advice(GPUS, hidden, (*STOCK, STOCK_RESHARD, RESHARD))
    assert text.startswith("Do not use LoCo: the step waits for computation, ")
    assert text.endswith(f" Use {STOCK_RESHARD} ({stock_s:.3g} s a step).{kept}")
    tight = dataclasses.replace(LARGE, memory_bytes=6e9)  # no room for errors
    assert advice(GPUS, tight) == (
        f"Use {STOCK_RESHARD}: others do not fit into 6 GB a rank.{kept}"
    )


def test_recommendation_of_one_rank_a_node_keeps_nothing() -> None:
    cluster = dataclasses.replace(GPUS, num_nodes=8, ranks_per_node=1)
    text = advice(cluster, LARGE, (*STOCK, "loco-hierarchical", INT8))
    assert " Set LoCoConfig(weight_bits=8). Parameters then cross " in text


def test_beside_parameters_in_low_bits_stand_the_best_exact_ones() -> None:
    job = dataclasses.replace(LARGE, memory_bytes=10e9)  # a replica in each node does not fit
    text = advice(GPUS, job)
    assert text.startswith(f"Use {DIFFERENCES}: ")
    # Between nodes 31 of 32 parts of 16 GB, and three quarters of the codes of gradients; inside 7
    # of 8 parts of 16 GB, and of 32 GB of gradients, of which an eighth passes the codec.
    between_s = 8 * (16 * 31 / 32 + 8 * W4 * 3 / 4) / 100
    step_s = between_s + 8 * (16 + 32) * 7 / 8 / 2400 + 32 / 8 / 500
    assert text.endswith(f" with exact ones is {RESHARD}: {step_s:.3g} s a step, 8.016 GB a rank.")


def test_where_hsdp_does_not_fit_the_best_other_way_is_offered() -> None:
    text = advice(GPUS, LARGE)
    assert text.startswith("Use hsdp-loco: ")
    assert "if that does not fit, loco-differences: " in text
    assert f"the best way with exact ones is {RESHARD}: " in text


def test_of_equals_the_one_with_exact_parameters_then_the_smallest() -> None:
    hidden = dataclasses.replace(LARGE, compute_s=2.0)  # hides all that they send
    ways = (*STOCK, DIFFERENCES, "hsdp-loco", RESHARD)
    assert advice(GPUS, hidden, ways).startswith(f"Use {RESHARD}: 2 s a step")


def test_memory_refuses_what_nodes_keep() -> None:
    job = dataclasses.replace(LARGE, memory_bytes=7e9)  # 6 GB with errors, or with what is kept
    text = report(GPUS, job)
    # It sends 31 GB, and loco-hierarchical 34.1: both gathers, 31 GB, and gradients in low bits.
    assert "not what the step waits for. Use fsdp-bf16-reshard (" in text
    marked = [row.split()[0] for row in text.splitlines() if "(!)" in row]
    assert marked == ["loco-flat", *NEW, "hsdp-fp32", "hsdp-bf16", "hsdp-loco"]


# The command line, and bad input

ARGV = [
    *("--parameters", "8B", "--nodes", "4", "--ranks-per-node", "8"),
    *("--inter-bandwidth", "100Gb/s", "--compute", "500ms"),
]


def test_microbatches_are_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    main([*ARGV, "--microbatches", "4"])
    four = capsys.readouterr().out
    assert four.strip() == report(GPUS, dataclasses.replace(LARGE, microbatches=4))
    assert "the gradients of the whole model, 32 GB in float32." in four
    main(ARGV)
    assert "microbatches" not in capsys.readouterr().out
    main([*ARGV, "--microbatches", "4", "--framework", "ddp"])
    assert "microbatches" not in capsys.readouterr().out


@pytest.mark.parametrize("count", [0, -1, 1.5])
def test_job_refuses_microbatches(count: int) -> None:
    with pytest.raises(ValueError, match=r"microbatches=.*: it must be an integer of 1 or more"):
        dataclasses.replace(JOB, microbatches=count)
