"""Several hosts on one machine: network namespaces on a bridge, with an optional rate per link.

    with Netlab(hosts=4, rate="1gbit") as lab:
        server = lab.run(0, [sys.executable, "serve.py", lab.hosts[0].address])

or `python -m benchmarks.netlab --hosts 4 --rate 1gbit -- COMMAND...`. Needs root, `ip` and `tc`. No packet leaves these
namespaces, and the machine's own network does not change. Namespaces rather than containers: no image, no daemon, and
four hosts are up in 0.15 s. `tbf` rather than `netem`: it is in every kernel. Delay, jitter and loss, of all ways or of
single hosts and pairs (`path`, `paths`), are a relay's in user space, for the same reason. Hosts can be cut off, in
one direction or both, lose their link for a while, and have their connections reset.
"""

from benchmarks.netlab.iproute import NetlabError, preflight
from benchmarks.netlab.lab import Host, Netlab
from benchmarks.netlab.paths import Path

__all__ = ["Host", "Netlab", "NetlabError", "Path", "preflight"]
