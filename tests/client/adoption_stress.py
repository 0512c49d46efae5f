"""A script's life in seeded steps: tensors that are made, used, resized, forked with and dropped, beside other memory.

    python -m tests.client.adoption_stress SEED STEPS

Every value that a tensor should have is checked, in this process, in its children and at the daemon's end. Prints how
many uses there were of adopted tensors; else it exits with 1 and says what was wrong.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from fusion_rt.client.adoption import Adoptions, Use
from fusion_rt.host.arena import Arena, Segment
from fusion_rt.torch.core.tensors import place_of

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as in <malloc.h>
_SIZES = (20_000, 30_000, 70_000, 200_000, 500_000, 1_500_000)  # elements
_MOST = 25
_PART = 50_000


class Script:
    """The script, and the daemon's end of its arena.

    Attributes:
        live: its tensors, each with the value that all of its elements have.
    """

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.seed = seed
        self.live: list[list[Any]] = []
        self.used = 0
        self._other: list[Any] = []
        self._segments: dict[int, Segment] = {}
        self._libc = ctypes.CDLL(None)
        self._libc.mallopt(_MMAP_THRESHOLD, self.choose.choice([128 * 1024, 1 << 20, 32 << 20]))
        self._libc.mallopt(_TRIM_THRESHOLD, 128 * 1024)
        arena = Arena(self._offered, lambda number: self._segments.pop(number).close())
        self.adoptions = Adoptions(arena, True)
        own = SimpleNamespace(may_take=lambda nbytes: False)
        client = SimpleNamespace(arena=arena, adoptions=self.adoptions, own_memory=own)
        self._here: Any = SimpleNamespace(client=client, allocating=threading.RLock())

    def _offered(self, number: int, segment: Segment, plan: int) -> None:
        self._segments[number] = Segment.open(os.dup(segment.fd), segment.nbytes)
        segment.close_fd()

    def check(self, tensor: torch.Tensor, value: float, where: str) -> None:
        if tensor.numel() and not bool((tensor == value).all()):
            print(f"seed {self.seed}: {where} has {tensor[tensor != value][:4]} and not {value}", flush=True)
            os._exit(1)

    def make(self) -> None:
        value = float(self.choose.randrange(1000))
        size = self.choose.choice(_SIZES) + self.choose.randrange(5000)
        self.live.append([torch.full((size,), value), value])
        if len(self.live) > _MOST:
            self.live.pop(0)

    def use(self) -> None:
        entry = self.choose.choice(self.live)
        tensor, value = entry
        if self.choose.random() < 0.3 and tensor.numel() > _PART:
            low = self.choose.randrange(tensor.numel() - _PART)
            tensor = tensor[low : low + _PART]
        written = self.choose.random() < 0.5
        for _ in range(self.choose.choice([1, 3])):
            uses: list[Use] = []
            place_of(self._here, tensor, uses, written)
            for use in uses:
                self.used += 1
                number, offset = use.place
                there = self._segments[number].view[offset : offset + tensor.nbytes]
                elements = torch.frombuffer(there, dtype=torch.float32)
                self.check(elements, value, "the daemon")
                if written:
                    elements.fill_(value + 1)
                use.end(True)
                if written:
                    self.check(tensor, value + 1, "the result")
                    entry[0].fill_(value + 1)
                    value = entry[1] = value + 1

    def resize(self) -> None:
        entry = self.choose.choice(self.live)
        tensor, value = entry
        storage = tensor.untyped_storage()
        storage.resize_(0)
        self._other.append([bytes(self.choose.randrange(300_000)), torch.full((tensor.numel() * 4 // 3,), 5.0)])
        if self.choose.random() < 0.7:
            storage.resize_(tensor.nbytes)
            tensor.fill_(value)
        else:
            self.live = [each for each in self.live if each is not entry]

    def allocate(self) -> None:
        zeros = np.zeros(self.choose.choice([1000, 20_000, 60_000, 300_000]), np.float32)
        self.check(torch.from_numpy(zeros), 0.0, "calloc")
        self._other.append(zeros)
        if len(self._other) > _MOST:
            self._other.pop(self.choose.randrange(len(self._other)))

    def trim(self) -> None:
        self._libc.malloc_trim(0)

    def fork(self) -> None:
        pid = os.fork()
        if pid == 0:
            for tensor, value in self.live:
                self.check(tensor, value, "a child")
            for tensor, _ in self.live:
                tensor.fill_(-1)
            os._exit(0)
        for tensor, value in self.live[:3]:
            tensor.fill_(value)
        if os.waitpid(pid, 0)[1]:
            os._exit(1)

    def run(self, steps: int) -> None:
        acts = [self.make, self.use, self.drop, self.resize, self.allocate, self.trim, self.fork]
        for _ in range(steps):
            act = self.choose.choices(acts, [20, 40, 8, 8, 15, 3, 6])[0]
            if self.live or act in (self.make, self.allocate, self.trim, self.fork):
                act()
            for tensor, value in self.choose.sample(self.live, min(3, len(self.live))):
                self.check(tensor, value, "a tensor")
        self.adoptions.close()
        for tensor, value in self.live:
            self.check(tensor, value, "a tensor at the end")

    def drop(self) -> None:
        self.live.pop(self.choose.randrange(len(self.live)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    script = Script(int(sys.argv[1]))
    script.run(int(sys.argv[2]))
    print(script.used)
