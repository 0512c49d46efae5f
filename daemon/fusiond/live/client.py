"""Client of tools for the jobs of this host: it asks one daemon of each job, which asks the others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from fusion_rt import wire
from fusion_rt.core.errors import FusionError
from fusion_rt.local.daemons import NoAnswer, ask, find
from fusiond.live.rates import Rates, compare

_ANSWER = 5.0  # seconds for a daemon, which waits for the others up to `figures.PATIENCE`


class Lookout:
    """Asks for the figures of jobs repeatedly, and compares them.

    Args:
        root: FUSION_RUNTIME_DIR.
        job: only this one; "": all.
    """

    def __init__(self, root: str, job: str = "") -> None:
        self._root = root
        self._job = job
        self._last: dict[str, Mapping[str, Any]] = {}

    def look(self) -> list[Rates]:
        """Returns the changes in each job since the last look.

        Raises:
            FusionError: no daemon of this user answers on this host.
        """
        found = self.documents()
        rates = [compare(self._last.get(document["job"]), document) for document in found]
        self._last = {document["job"]: document for document in found}
        return rates

    def documents(self) -> list[dict[str, Any]]:
        """Returns the figures of each job, as `figures.document` makes them. Raises as `look` does."""
        documents = []
        why_not = ""
        for _, group in groupby(find(self._root, self._job), key=lambda found: found.job):
            for found in group:
                if not os.path.exists(found.socket_path):
                    continue
                try:
                    documents.append(ask(found, wire.JobRequest(), _ANSWER)[1])
                    break
                except NoAnswer as error:
                    why_not = f": that of node {found.node} of job {found.job!r} does not answer ({error})"
        if not documents:
            of_job = f" of job {self._job!r}" if self._job else ""
            raise FusionError(f"no daemon{of_job} of this user answers on this host{why_not}")
        return documents
