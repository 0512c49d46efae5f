"""The launcher, called from a program."""

from fusion_rt import run

__all__ = ["run"]
