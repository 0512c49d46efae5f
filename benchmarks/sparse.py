"""Bytes that a node sends in a step of top-k, by the number of nodes: through owners of ranges, and by gathering.

    python -m benchmarks.sparse
    python -m benchmarks.sparse --hosts 2,4 --density 0.001

Each rank runs in a network namespace of its own (root needed), as on a host of its own. There is one tensor of 4 M
elements; its gradients are random, in such a way that the nodes' selections have half of their elements in common, as
they do in training. Printed are bytes of payload a step on the node that sends the most, and the same divided by k, in
values of 4 bytes, so that a value of 2 bytes with its index is about one. *wire* is the number of bytes that the host's
link counts, with the headers of the daemon's messages, of ZeroMQ, TCP, IP and Ethernet, acknowledgements, and the
daemons' other messages.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from benchmarks.common import arguments as shared
from benchmarks.common import launch, results
from benchmarks.common.results import Measure, Record, Setting
from benchmarks.common.tables import Table

NAME = "sparse"
PAYLOAD, WIRE = "payload", "wire"
ELEMENTS = 4_000_000
VALUE_BYTES = 4
ROUTES = ("owners", "gather")


def worker(density: float, steps: int, elements: int) -> None:
    """Trains on each rank; rank 0 prints the bytes of payload and on the link that the node which sends most sends in a
    step."""
    import torch

    import fusion_rt.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    shared = torch.randn(elements)
    torch.manual_seed(1 + hvd.rank())
    parameter = torch.nn.Parameter(torch.zeros(elements))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=0.0), [("w", parameter)], compression=f"topk(density={density}, minimum=0)"
    )

    def step() -> None:
        gradient = shared + torch.randn(elements)
        optimizer.zero_grad()
        (parameter * gradient).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def counters() -> tuple[int, int]:
        hvd.barrier()
        return int(hvd.compression_stats()["total"]["bytes_packed"]), launch.link_bytes()

    for _ in range(2):  # the first step makes the plan, and after the second the ranges are adapted
        step()
    payload, link = counters()
    for _ in range(steps):
        step()
    payload_after, link_after = counters()
    mine = torch.tensor([payload_after - payload, link_after - link], dtype=torch.float64) / steps
    most = hvd.allreduce(mine, op=hvd.Max)
    if hvd.rank() == 0:
        launch.tell(most.tolist())
    hvd.shutdown()


def measure(hosts: int, route: str, density: float, steps: int, elements: int = ELEMENTS) -> list[float]:
    """Measures the bytes a step of payload and on the link, of the node that sends the most."""
    command = ["-m", "benchmarks.sparse", "--worker", "--elements", str(elements)]
    command += ["--density", str(density), "--steps", str(steps)]
    # Encryption as by default: its bytes are counted, too.
    variables = {"FUSION_SPARSE_ROUTE": route, "FUSION_ENCRYPTION": os.environ.get("FUSION_ENCRYPTION", "auto")}
    found: list[float] = launch.on_hosts(hosts, None, command, variables=variables)
    return found


def records(found: Mapping[tuple[int, str], Sequence[float]], density: float, elements: int) -> list[Record]:
    """Makes a record for each number of hosts."""
    here, date = results.begin()
    made = []
    for hosts in sorted({hosts for hosts, _ in found}):
        setting: Setting = {"hosts": hosts, "density": density, "elements": elements}
        measures = [
            Measure(
                what, "B", {route: results.rounded([found[hosts, route][index]]) for route in ROUTES}, portable=True
            )
            for index, what in enumerate((PAYLOAD, WIRE))
        ]
        made.append(Record(setting, measures, here, date, results.command_line()))
    return made


def show(records: Sequence[Record]) -> None:
    """Prints a table with a row for each number of hosts."""
    setting = records[0].setting
    k = selected(records[0])
    columns = [title for route in ROUTES for title in (f"{route}: payload", f"values / k, {route}", f"wire, {route}")]
    title = f"{setting['elements']:,} elements, k = {k:,}: bytes that a node sends in a step"
    table = Table(["hosts", *columns], title=title)
    for record in records:
        row = []
        for route in ROUTES:
            payload, wire = (record.measure(what).samples[route][0] for what in (PAYLOAD, WIRE))
            row += [f"{payload:,.0f}", f"{payload / VALUE_BYTES / k:.2f}", f"{wire:,.0f}"]
        table.add(str(record.setting["hosts"]), *row)
    table.show()


def selected(record: Record) -> int:
    """Returns the number of elements that are selected in a step."""
    return round(float(record.setting["elements"]) * float(record.setting["density"]))


def main() -> None:
    """Runs what the command line asks for."""
    parser = shared.parser(NAME, __doc__)
    parser.add_argument("--hosts", default="2,3,4,6,8", help="numbers of netlab hosts, one rank on each")
    parser.add_argument("--density", type=float, default=0.01, help="share of the elements that is selected")
    parser.add_argument("--steps", type=int, default=6, help="steps that are measured")
    parser.add_argument("--elements", type=int, default=ELEMENTS, help="of the tensor")
    shared.add_out(parser)
    shared.add_worker(parser)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.density, arguments.steps, arguments.elements)
        return
    found = {
        (number, route): measure(number, route, arguments.density, arguments.steps, arguments.elements)
        for number in shared.numbers(arguments.hosts)
        for route in ROUTES
    }
    made = records(found, arguments.density, arguments.elements)
    if arguments.out:
        results.keep(arguments.out, NAME, *made)
    show(made)


if __name__ == "__main__":
    main()
