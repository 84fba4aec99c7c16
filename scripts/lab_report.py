"""What the bandwidth lab makes of the steps it has measured: tables, a plot, the planner's view."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from statistics import fmean, median
from typing import Any

from lab_rank import RankSpec
from loco_fsdp.planning.cluster import Cluster
from loco_fsdp.planning.cost_model import predict

_SCHEMES = (
    *(("FSDP", ("fsdp", "ring", "loco")), ("HSDP", ("hsdp",)), ("DDP", ("ddp",))),
    ("Megatron's instances", ("megatron-instances",)),
)
_PLANNED_AS = {
    "ring-fp32": "fsdp-fp32",
    "ring-bf16": "fsdp-bf16",
    "ring-bf16-reshard": "fsdp-bf16-reshard",
}


def summarize(answers: list[dict[str, Any]], spec: RankSpec) -> dict[str, dict[str, Any]]:
    """Medians over steps by way, from what all ranks measured.

    A step takes as long as on its slowest rank, a reduction as long as on average: the first rank
    to arrive waits in it for the last. Bytes are those of a node, on average; `steps` has them all.
    """
    rows = {}
    nodes = answers[:: spec.ranks_per_node]
    for way in spec.ways:
        of_ranks, of_nodes = [answer[way] for answer in answers], [answer[way] for answer in nodes]
        steps = {
            "step_s": [max(seconds) for seconds in _by_step(of_ranks, "step_s")],
            "reduce_s": [fmean(seconds) for seconds in _by_step(of_ranks, "reduce_s")],
            "node_bytes": [fmean(sent) for sent in _by_step(of_nodes, "link")],
            "local_bytes": [fmean(sent) for sent in _by_step(of_nodes, "local")],
        }
        rows[way] = {**{name: median(values) for name, values in steps.items()}, "steps": steps}
    return rows


def _by_step(ranks: list[dict[str, list[float]]], name: str) -> list[tuple[float, ...]]:
    return list(zip(*(rank[name] for rank in ranks), strict=True))


def join(rounds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What all ranks measured, of several rounds one after the other."""
    return [
        {
            way: {name: [value for part in parts for value in part[way][name]] for name in row}
            for way, row in parts[0].items()
        }
        for parts in zip(*rounds, strict=True)
    ]


def add_plan(measured: dict[str, Any], probed: list[dict[str, Any]], spec: RankSpec) -> None:
    """Put what the planner predicts beside what was measured.

    Args:
        measured: of one bandwidth; its ways get `plan`, with the ratios predicted / measured.
        probed: what a rank answered to each `probe`; the mean of the predictions counts.
        spec: what ranks were told.
    """
    measured["probed"] = probed
    for way, row in measured["ways"].items():
        plans = [_predict(way, answer, spec) for answer in probed]
        row["plan"] = {name: fmean([plan[name] for plan in plans]) for name in plans[0]}
        row["plan"] |= {
            f"{name}_ratio": value / row[name] if row[name] else float("nan")
            for name, value in row["plan"].items()
        }


def _predict(way: str, probed: dict[str, Any], spec: RankSpec) -> dict[str, float]:
    cluster, job = Cluster(**probed["cluster"]), spec.job(probed["compute_s"])
    if way in _PLANNED_AS:
        way = _PLANNED_AS[way]
        rates = {**cluster.rates, **probed["ring_rates"]}
        cluster = dataclasses.replace(cluster, stock_factor=1.0, rates=rates)
    planned = predict(way, cluster, job)
    return {
        "node_bytes": planned.inter_node_bytes,
        "reduce_s": planned.reduce_s,
        "step_s": planned.step_s,
    }


def table(measured: dict[str, Any]) -> str:
    """The medians of one bandwidth as text, with predicted / measured where there is a plan."""
    header = ["way", "step ms", "reduction ms", "node sends MB", "over loopback MB"]
    planned = any("plan" in row for row in measured["ways"].values())
    rows = [header + ["plan: step", "reduction", "bytes"] * planned]
    for way, row in measured["ways"].items():
        cells = [
            way,
            f"{row['step_s'] * 1e3:.1f}",
            f"{row['reduce_s'] * 1e3:.1f}" if row["reduce_s"] else "-",
            f"{row['node_bytes'] / 1e6:.3f}",
            f"{row['local_bytes'] / 1e6:.3f}",
        ]
        if planned:
            names = ("step_s_ratio", "reduce_s_ratio", "node_bytes_ratio")
            cells += [f"{row['plan'][name]:.2f}" for name in names]
        rows.append(cells)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    if planned:
        lines.append("plan is predicted / measured")
        for probed in measured["probed"]:
            cluster = probed["cluster"]
            lines.append(
                f"probed: {cluster['inter_bandwidth'] / 1e6:.0f} Mb/s between nodes, codec "
                f"{cluster['codec_rate'] / 1e9:.3g} GB/s, ranks wait {cluster['wait_s'] * 1e3:.1f} "
                f"ms, a step without communication {probed['compute_s'] * 1e3:.1f} ms"
            )
    return "\n".join(lines)


def crossing(rates: list[float], loco_s: list[float], other_s: list[float]) -> float | None:
    """Bits/s from which on `other` is faster, on a line between two measurements; None: nowhere."""
    gains = [other - loco for other, loco in zip(other_s, loco_s, strict=True)]
    for index in range(len(gains) - 1):
        low, high = gains[index], gains[index + 1]
        if low > 0 >= high:
            share = low / (low - high)
            return rates[index] * float(rates[index + 1] / rates[index]) ** share
    return None


def plot(results: dict[str, Any], path: Path) -> str:
    """Step time over bandwidth, into `path`; returns where the fastest LoCo stops paying."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator

    runs = results["runs"]
    rates = [run["bits_per_s"] for run in runs]
    seconds = {way: [run["ways"][way]["step_s"] for run in runs] for way in runs[0]["ways"]}
    figure, axes = pyplot.subplots(figsize=(9, 5))
    for way, steps in seconds.items():
        axes.loglog(rates, steps, "o-" if "loco" in way else "s--", label=way)
    lines = []
    for scheme, prefixes in _SCHEMES:
        ways = [way for way in seconds if way.startswith(prefixes)]
        stock = [way for way in ways if "loco" not in way]
        loco = [way for way in ways if "loco" in way]
        if not stock or not loco:
            continue
        fastest = [
            [min(s) for s in zip(*(seconds[w] for w in g), strict=True)] for g in (loco, stock)
        ]
        rate = crossing(rates, *fastest)
        if rate is not None:
            axes.axvline(rate, color="gray", linewidth=0.8)
            # One below the other: they may be at the same rate.
            axes.annotate(
                f" LoCo pays for {scheme} up to {rate / 1e9:.2g} Gb/s",
                (rate, 0.96 - 0.05 * len(lines)),
                xycoords=axes.get_xaxis_transform(),
                fontsize="small",
            )
        where = "in no place of the sweep" if rate is None else f"from {rate / 1e9:.3g} Gb/s on"
        lines.append(f"{scheme}: the fastest other way overtakes LoCo {where}")
    axes.set_xlabel("bandwidth of a node's link")
    axes.set_xticks(rates, [run["rate"] for run in runs])
    axes.set_ylabel("step (s)")
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(path)
    return "\n".join(lines)
