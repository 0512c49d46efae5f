"""Tables of measurements beside peers: all-reduce, steps, start, selection, overlap, and the cost of the daemon."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks import (
    allreduce,
    autotune,
    control,
    cores,
    detection,
    elastic,
    encryption,
    recovery,
    startup,
    step,
    trace_tools,
)
from benchmarks import overlap as overlapping
from benchmarks.common import tables
from benchmarks.common.peers import DDP, HOROVOD
from benchmarks.common.results import Record, Results, ResultsError
from benchmarks.common.sampling import median, quartiles, ratio
from benchmarks.common.tables import Table

All = Mapping[str, Results]
README_SIZES = (4, 65_536, 1_048_576, 25_600_000, 102_400_000, 268_435_456, 1_073_741_824)


def records(found: All, suite: str) -> list[Record]:
    """Returns the records of a suite.

    Raises:
        ResultsError: it was not measured.
    """
    if suite not in found:
        raise ResultsError(f"There are no results of {suite}: `python -m benchmarks {suite}` makes them.")
    return found[suite].records


def machine(found: All) -> str:
    """Describes the machines of the all-reduces and steps in a sentence or two."""
    machines = [record.machine for suite in ("allreduce", "step") for record in records(found, suite) if record.machine]
    loads = [each.load for each in machines]
    kinds = {(each.cores, each.cpu, each.memory_gb, each.python, each.torch.partition("+")[0]) for each in machines}
    told = "; ".join(
        f"{cores} cores ({cpu}), {memory} GB, Python {python}, torch {torch}"
        for cores, cpu, memory, python, torch in sorted(kinds)
    )
    sentence = f"Measured on one virtual machine with {told}; load averages when measurements began: {min(loads):g} to "
    sentence += f"{max(loads):g}."
    if any(each.busy for each in machines):
        sentence += (
            " A load average above half of the cores means that other programs used them, too. It may also not have "
            "fallen yet after the measurement before. Then a contender with more processes, such as fusion_rt with "
            "its daemons, is slower than on an idle machine."
        )
    return sentence


def _times(found: Record, name: str, over: str, under: str) -> str:
    """Formats the ratio of two contenders; empty where one of them was not measured."""
    samples = found.measure(name).samples
    return tables.ratio(ratio(samples[over], samples[under])) if {over, under} <= samples.keys() else ""


def in_order(found: Sequence[Record]) -> list[Record]:
    """Sorts records of all-reduces or steps: few hosts first, then unshaped links, then few ranks."""
    return sorted(
        found, key=lambda each: (each.setting["hosts"], each.setting.get("rate") != "unshaped", each.setting["ranks"])
    )


def allreduce_overview(found: All) -> str:
    """Makes the README's table of all-reduces: gloo's time over fusion_rt's, by size, a row for each setting."""
    made = in_order(records(found, "allreduce"))
    measured = {measure.name for record in made for measure in record.measures}
    sizes = [size for size in README_SIZES if str(size) in measured]
    table = Table(["gloo's time / fusion_rt's", *map(tables.nbytes, sizes)])
    for record in made:
        here = {measure.name: measure.samples for measure in record.measures}
        for contender, more in ((allreduce.ARENA, ""), (allreduce.COPY, ", tensor outside the arena")):
            cells = [here.get(str(size)) for size in sizes]
            row = [f"{_plain(each[allreduce.GLOO], each[contender])}" if each else "" for each in cells]
            table.add(allreduce.title(record.setting) + more, *row)
    return table.markdown()


def _plain(over: list[float], under: list[float]) -> str:
    """Formats a ratio without its interval; in bold where the whole interval is below 1."""
    found = ratio(over, under)
    text = tables.number(found.value, 2)
    return f"**{text}**" if found.high < 1 else text


def allreduce_details(found: All) -> str:
    """Makes the tables of all-reduces in every setting and size, with intervals."""
    parts = []
    for record in in_order(records(found, "allreduce")):
        limited = allreduce.limit(record.setting, 1) is not None
        columns = ["size", "arena, ms", "copy, ms", "gloo, ms", "Horovod, ms", "gloo / arena", "gloo / copy"]
        table = Table([*columns, "Horovod / arena", *(["arena / limit"] if limited else [])])
        for each in record.measures:
            names = (allreduce.ARENA, allreduce.COPY, allreduce.GLOO, HOROVOD)
            row = [tables.ms(median(each.samples[name])) if name in each.samples else "" for name in names]
            row += [_times(record, each.name, allreduce.GLOO, name) for name in (allreduce.ARENA, allreduce.COPY)]
            row.append(_times(record, each.name, HOROVOD, allreduce.ARENA))
            if seconds := allreduce.limit(record.setting, int(each.name)):
                row.append(tables.number(median(each.samples[allreduce.ARENA]) / seconds))
            table.add(tables.nbytes(int(each.name)), *row)
        parts.append(f"{_titled(allreduce.title(record.setting), record)}\n\n{table.markdown()}")
    return "\n\n".join(parts)


def _titled(title: str, record: Record) -> str:
    load = f" (load {record.machine.load:g} before)" if record.machine else ""
    return f"**{title}**{load}"


def steps_overview(found: All) -> str:
    """Makes the README's table of steps by runtime, with a column for each setting."""
    made = in_order(records(found, "step"))
    table = Table(["a step, ms (DDP's time / this)", *(where(record) for record in made)])
    for name in step.RUNTIMES:
        cells = []
        for record in made:
            samples = record.measure(step.STEP).samples
            times = f"{tables.number(ratio(samples[DDP], samples[name]).value, 2)}" if name in samples else ""
            cells.append(f"{tables.ms(median(samples[name]))} ({times})" if name in samples else "")
        if any(cells):
            table.add(name, *cells)
    return table.markdown()


def where(record: Record) -> str:
    setting = record.setting
    if setting["hosts"] == 1:
        return f"one host, {setting['ranks']} ranks"
    return f"{setting['hosts']} hosts, {setting['rate']}"


def steps_details(found: All) -> str:
    """Makes the tables of steps in every setting, with intervals, CPU time and bytes."""
    parts = []
    for record in in_order(records(found, "step")):
        table = Table(
            ["runtime", "ms a step", "quartiles", "DDP / this", "CPU, ms", "DDP / this (CPU)", "MB sent by a host"]
        )
        sent = {each.name: each.samples for each in record.measures}.get(step.SENT, {})
        for name, samples in record.measure(step.STEP).samples.items():
            spread = quartiles(samples)
            table.add(
                name, tables.ms(spread.value), f"{tables.ms(spread.low)}–{tables.ms(spread.high)}",
                _times(record, step.STEP, DDP, name), tables.ms(median(record.measure(step.CPU).samples[name])),
                _times(record, step.CPU, DDP, name), f"{median(sent[name]) / 1e6:.1f}" if name in sent else "",
            )  # fmt: skip
        parts.append(f"{_titled(step.title(record), record)}\n\n{table.markdown()}")
    return "\n\n".join(parts)


def costs(found: All) -> str:
    """Makes the table of the parts of fusion_rt's step, and the daemon's CPU time by bytes."""
    made = in_order(records(found, "step"))
    table = Table(["fusion_rt, each step", *(where(record) for record in made)])
    names = list(dict.fromkeys(each.name for record in made for each in record.measures))
    for name in (name for name in names if name not in (step.STEP, step.CPU)):
        there = [{each.name: each for each in record.measures}.get(name) for record in made]
        table.add(name, *(step.told(each) if each else "" for each in there))
    about = [record.details for record in made]
    table.add("buckets", *(str(each["buckets"]) for each in about))
    on_a_host = [int(record.setting["ranks"]) // int(record.setting["hosts"]) for record in made]
    per_bucket = [each["messages"] / each["buckets"] / ranks for each, ranks in zip(about, on_a_host, strict=True)]
    table.add("messages from a worker per bucket", *(f"{number:.2f}" for number in per_bucket))
    return table.markdown()


def goals(found: All) -> str:
    """Makes the table of goals: what was asked, and what was reached."""
    table = Table(["goal", "asked", "reached", ""], left=1)

    def row(goal: str, asked: str, reached: Sequence[float], enough: Callable[[float], bool], unit: str = "") -> None:
        low, high = (tables.number(edge(reached), 2) for edge in (min, max))
        spread = low if low == high else f"{low} to {high}"
        met = sum(map(enough, reached))
        verdict = "met" if met == len(reached) else "missed" if not met else f"missed in {len(reached) - met}"
        table.add(goal, asked, f"{spread}{unit}", verdict)

    def times(
        setting: Mapping[str, object], contender: str, least: int, most: int, suite: str = "allreduce"
    ) -> list[float]:
        chosen = [each for each in records(found, suite) if setting.items() <= each.setting.items()]
        pairs = [each.samples for record in chosen for each in record.measures if least <= int(each.name) <= most]
        return [ratio(samples[allreduce.GLOO], samples[contender]).value for samples in pairs]

    def backend(goal: str, asked: float, least: int, most: int, **setting: object) -> None:
        reached = times({"operation": "all_reduce", **setting}, "fusion", least, most, "backend")
        row(f"torch.distributed, {goal}: gloo / fusion", str(asked), reached, lambda each: each >= asked)

    pair: dict[str, object] = {"hosts": 1, "ranks": 2}
    row("4 B, 2 ranks on one host: gloo / fusion_rt", "5", times(pair, allreduce.ARENA, 4, 4), lambda each: each >= 5)
    large, one = (25_600_000, 1 << 40), (102_400_000, 102_400_000)
    found_there = times({"hosts": 4}, allreduce.ARENA, *large)
    row("from 25.6 MB on, 4 hosts: gloo / fusion_rt", "1.0", found_there, lambda each: each >= 1)
    arena, copy = (times({"hosts": 1}, contender, *one) for contender in (allreduce.ARENA, allreduce.COPY))
    row("102.4 MB outside the arena, one host: gloo / fusion_rt", f"{tables.number(min(arena), 2)}, as inside", copy,
        lambda each: each >= min(arena))  # fmt: skip
    python = [
        1e3 * median(record.measure(step.PARTS["python"]).samples[step.OURS]) for record in records(found, "step")
    ]
    row("Python in a worker, a step of 161 tensors", "2 ms", python, lambda each: each <= 2, " ms")
    backend("4 B, 2 and 4 ranks on one host", 2.0, 4, 4, hosts=1)
    backend("4 to 102.4 MB, 2 ranks on one host", 6.0, 4 << 20, 1 << 40, hosts=1, ranks=2)
    backend("25.6 MB, 4 ranks on one host", 7.0, 4 << 20, 1 << 40, hosts=1, ranks=4)
    backend("25.6 MB, 2 hosts with 4 ranks", 1.5, 4 << 20, 1 << 40, hosts=2, ranks=4)
    for record in records(found, "backend_step"):
        if record.setting["model"] in ("ddp", "fsdp2"):
            samples = record.measures[0].samples
            reached = [ratio(samples[allreduce.GLOO], samples["fusion"]).value]
            model = str(record.setting["model"]).upper()
            row(f"a step of {model}, one host: gloo / fusion", "2.0", reached, lambda each: each >= 2)
    for record in _faulted(found):
        run, where = record.details[recovery.OURS], f"elastic, {record.setting['ranks']} ranks"

        def medians(what: str, *kinds: str, run: Mapping[str, Any] = run) -> list[float]:
            of_kinds = [[fault for fault in run["faults"] if fault["kind"] == kind] for kind in kinds]
            return [median([fault[what] for fault in faults]) for faults in of_kinds]

        joins = [pause / run["step"] for pause in medians("join_pause", *recovery.KINDS)]
        row(f"{where}: pause of the others at a join", "1 step", joins, lambda each: each <= 1, " steps")
        silent = float(record.setting["timeout"])
        cut = [(pause - silent) / run["step"] for pause in medians("pause", recovery.CUT)]
        row(f"{where}: pause after a cut, beyond the limit of silence", "1 step", cut, lambda each: each <= 1, " steps")
        kept = medians("kept", *recovery.KINDS)
        row(f"{where}: steps kept with a fault every 20 s", "0.97", kept, lambda each: each >= 0.97)
    return table.markdown()


def _faulted(found: All) -> list[Record]:
    """Returns the records of trainings under faults of which only time is measured."""
    return [record for record in records(found, "recovery") if "samples" not in record.setting]


def starts(found: All) -> str:
    """Makes the table of starts: seconds until the last worker had reached each phase."""
    (record,) = records(found, "startup")
    names = list(record.measures[0].samples)
    table = Table(["seconds until", *names, "torchrun / fusionrun"])
    for each in record.measures:
        row = [f"{median(each.samples[name]):.2f}" for name in names]
        table.add(each.name, *row, _times(record, each.name, startup.TORCHRUN, startup.OURS))
    return table.markdown()


def selection(found: All) -> str:
    """Makes the table of the codec's whole step beside torch.topk."""
    from benchmarks import topk

    table = Table(["", "the codec's step, ms", "of it packing", "torch.topk, ms", "torch.topk / codec"], left=1)
    for record in records(found, "topk"):
        where = f"{record.details['elements'] / 1e6:.1f} M elements, " + (
            f"{record.setting['threads']} threads"
            if record.setting["device"] == "cpu"
            else str(record.setting["device"])
        )
        for each in record.measures:
            packing = each.samples.get("of it packing")
            table.add(
                f"{float(each.name):.1%} of {where}", tables.ms(median(each.samples[topk.CODEC])),
                tables.ms(median(packing)) if packing else "", tables.ms(median(each.samples[topk.TORCH])),
                _times(record, each.name, topk.TORCH, topk.CODEC),
            )  # fmt: skip
    return table.markdown()


def kernels(found: All) -> str:
    """Makes the table of reductions and conversions beside numpy."""
    from benchmarks import kernels as measuring

    (record,) = records(found, "kernels")
    table = Table([f"{record.setting['elements']:,} elements", "ms", "GB/s", "numpy / ours"])
    for each in record.measures:
        seconds, nbytes = median(each.samples[measuring.OURS]), record.details["bytes"].get(each.name)
        times = _times(record, each.name, measuring.NUMPY, measuring.OURS)
        table.add(each.name, tables.ms(seconds), f"{nbytes / seconds / 1e9:.1f}" if nbytes else "", times)
    return table.markdown()


def idle(found: All) -> str:
    """Makes the table of an idle daemon's footprint."""
    from benchmarks import footprint

    table = Table(["an idle daemon", "CPU", footprint.OWN])
    for record in (one for one in records(found, "footprint") if "ranks" in one.setting):
        share, own = (record.measure(name).samples[footprint.OURS][0] for name in (footprint.CPU, footprint.OWN))
        table.add(f"{record.setting['ranks']} ranks", f"{share:.3%} of a core", f"{own / 1e6:.0f} MB")
    return table.markdown()


def memory(found: All) -> str:
    """Makes the table of the memory that jobs need on two hosts with one worker each, and that they were measured to
    take."""
    from benchmarks import footprint
    from fusion_rt import algorithms, codecs
    from fusion_rt.choice.memory_needs import needs

    table = Table(
        ["algorithm", "codec", "worker", "measured", "daemon", "measured", "MB beside that", "longest callback"], left=2
    )
    measured = [one for one in records(found, "footprint") if "parameters" in one.setting]
    largest = {(str(one.setting["algorithm"]), str(one.setting["codec"])): one for one in _by_size(measured)}
    for (algorithm, codec), record in largest.items():
        of = {name: record.measure(name).samples[footprint.OURS][0] for name in footprint.MEASURES}
        told = needs(algorithms.parse(algorithm), codecs.parse(codec), 2)
        model = 4 * float(record.setting["parameters"])
        table.add(
            algorithm,
            codec,
            f"{told.worker:g}",
            f"{of['worker'] + of['arenas']:.1f}",
            f"{told.daemon:g}",
            f"{of['daemon, at most']:.1f}",
            f"{max(0.0, of['daemon, at most'] - told.daemon) * model / 1e6:.0f}",
            f"{of['longest callback'] * 1e3:.0f} ms",
        )
    return table.markdown()


def _by_size(measured: list[Record]) -> list[Record]:
    """Returns records in the order of their models' sizes."""
    return sorted(measured, key=lambda one: float(one.setting["parameters"]))


def sparse(found: All) -> str:
    """Makes the table of bytes that a host sends in a step of top-k."""
    from benchmarks import sparse as measuring

    table = Table(
        ["hosts", *(f"{route}: {what}" for route in measuring.ROUTES for what in ("values / k", "MB on the wire"))]
    )
    for record in records(found, "sparse"):
        row = []
        for route in measuring.ROUTES:
            payload, wire = (record.measure(what).samples[route][0] for what in (measuring.PAYLOAD, measuring.WIRE))
            values = payload / measuring.VALUE_BYTES / measuring.selected(record)
            row += [f"{values:.2f}", f"{wire / 1e6:.3f}"]
        table.add(str(record.setting["hosts"]), *row)
    return table.markdown()


def slow_network(found: All) -> str:
    """Makes the tables of a step on slow links, and of the bytes that a host sends in it."""
    from benchmarks import slow_network as measuring

    parts = []
    for record in records(found, "slow_network"):
        measured = measuring.of(record)
        where = (
            f"{measured['hosts']} hosts at {measured['rate']}, {measured['times']['parameters'] / 1e6:.1f} M parameters"
        )
        table = Table([where, "s a step", "DDP's time / this", "MB sent by a host"])
        for name, samples in measured["times"]["seconds"].items():
            times = _times(record, measuring.STEP, DDP, name)
            table.add(name, f"{median(samples):.2f}", times, f"{median(measured['times']['sent'][name]) / 1e6:.2f}")
        parts.append(table.markdown())
    return "\n\n".join(parts)


def bucket_sizes(found: All) -> str:
    """Makes the table of a step by the size of buckets and the rate of links."""
    from benchmarks import bucket_sizes as measuring

    of_rates: dict[str, dict[float, Record]] = {}
    for record in records(found, "bucket_sizes"):
        of_rates.setdefault(str(record.setting["rate"]), {})[float(record.setting["MiB"])] = record
    rates = [rate for rate in measuring.RATES if rate in of_rates]
    table = Table(["MiB at most", *(f"{rate}: ms a step (DDP / this)" for rate in rates)])
    for size in sorted({size for of_rate in of_rates.values() for size in of_rate}):
        row = []
        for rate in rates:
            samples = of_rates[rate][size].measure(measuring.STEP).samples if size in of_rates[rate] else {}
            times = ratio(samples[DDP], samples[measuring.OURS]).value if samples else 0.0
            row.append(f"{1e3 * median(samples[measuring.OURS]):,.0f} ({times:.2f})" if samples else "")
        table.add(f"{size:g}", *row)
    return table.markdown()


def overlap(found: All) -> str:
    """Makes the table of exposed communication with each way of overlap."""
    made = [overlapping.of(record) for record in records(found, "overlap")]
    columns = []
    for each in made:
        where = f"{each['ranks']} ranks on one host" if each["hosts"] == 1 else f"{each['hosts']} hosts, {each['rate']}"
        columns += [f"{where}, {each['compute'] * 1e3:.0f} ms of compute: step", "exposed", "waited", "DDP / this"]
    table = Table(["ms", *columns])
    for name in dict.fromkeys(name for each in made for name in each["seconds"]):
        row = []
        for each in made:
            if name not in each["seconds"]:
                row += ["", "", "", ""]
                continue
            waited = each["waited"].get(name)
            row += [tables.ms(median(each["seconds"][name])), f"{overlapping.exposed(each)[name] * 1e3:.0f}"]
            row.append("" if waited is None else f"{waited * 1e3:.0f}")
            row.append(f"{ratio(each['seconds'][overlapping.DDP], each['seconds'][name]).value:.2f}")
        table.add(f"`{name}`" if name in overlapping.OVERLAPS else name, *row)
    return table.markdown()


def faults(found: All) -> str:
    """Makes the tables of the time from a fault to the last exception."""
    return "\n\n".join(detection.table(record).markdown() for record in records(found, "detection"))


def losses(found: All, ranks: int) -> str:
    """Makes the tables of what losses and newcomers cost the others, where there are so many ranks."""
    made = [record for record in _faulted(found) if record.setting["ranks"] == ranks]
    return "\n\n".join(recovery.table(record).markdown() for record in made)


def learned(found: All) -> str:
    """Makes the tables of what a model has learned under faults."""
    made = [record for record in records(found, "recovery") if "samples" in record.setting]
    return "\n\n".join(recovery.learning_table(record).markdown() for record in made)


def large_traces(found: All) -> str:
    """Makes the tables of time and memory of `fusion-trace` on large jobs."""
    return "\n\n".join(trace_tools.table_of(record).markdown() for record in records(found, "trace_tools"))


def encrypted(found: All) -> str:
    """Makes the table of all-reduces with and without encryption of payloads."""
    records(found, "encryption")
    table = Table(
        ["link", "connections, I/O threads", "`all` ms", "`control` ms", "`all` as fast as `control`"], left=2
    )
    for record in records(found, "encryption"):
        for measure, way in zip(record.measures, encryption.WAYS, strict=True):
            both = [measure.samples[mode] for mode in encryption.MODES]
            times = tables.ratio(ratio(both[1], both[0]))
            table.add(
                str(record.setting["rate"]),
                ", ".join(map(str, way)),
                *(tables.ms(median(each)) for each in both),
                times,
            )
    return table.markdown()


def by_cores(found: All) -> str:
    """Makes the table of all-reduces on this many processors, with the busiest thread."""
    return cores.table(records(found, "cores")).markdown()


def tuned(found: All) -> str:
    """Makes the table of settings that `--autotune` and `--auto` find."""
    return autotune.table(records(found, "autotune")).markdown()


def elastic_changes(found: All) -> str:
    """Makes the tables of the cost of changes of membership."""
    return "\n\n".join(elastic.changes_table(record).markdown() for record in records(found, "elastic"))


def elastic_runs(found: All) -> str:
    """Makes the tables of the loss at the end, with and without changes of membership."""
    return "\n\n".join(elastic.runs_table(record).markdown() for record in records(found, "elastic"))


def control_phases(found: All) -> str:
    return control.phases(records(found, control.NAME)).markdown()


def control_parts(found: All) -> str:
    return control.large_parts(records(found, control.NAME)).markdown()


def control_losses(found: All) -> str:
    return control.found_losses(records(found, control.NAME)).markdown()


TABLES: dict[str, Callable[[All], str]] = {
    "machine": machine,
    "allreduce": allreduce_overview,
    "allreduce-details": allreduce_details,
    "step": steps_overview,
    "step-details": steps_details,
    "costs": costs,
    "goals": goals,
    "startup": starts,
    "topk": selection,
    "kernels": kernels,
    "footprint": idle,
    "memory": memory,
    "sparse": sparse,
    "slow-network": slow_network,
    "bucket-sizes": bucket_sizes,
    "overlap": overlap,
    "trace-tools": large_traces,
    "detection": faults,
    "recovery": partial(losses, ranks=4),
    "recovery-8": partial(losses, ranks=8),
    "recovery-samples": learned,
    "encryption": encrypted,
    "cores": by_cores,
    "autotune": tuned,
    "elastic-changes": elastic_changes,
    "elastic-runs": elastic_runs,
    "control": control_phases,
    "control-parts": control_parts,
    "control-losses": control_losses,
}
