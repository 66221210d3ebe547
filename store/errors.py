"""The errors of the store; each message is one line that names the cause and the cure."""

from __future__ import annotations


class StoreError(Exception):
    """Something the store refused or could not do; nothing stored before is affected."""


class StoreFull(StoreError):
    """There is no room: the map is full of what may not be evicted, or the disk is full."""


class MapFull(StoreFull):
    """LMDB found no free run of pages: space is freed but not usable yet, or in small pieces."""


class OverBudget(StoreFull):
    """The day's budget of written bytes is spent; records are still written."""


class StoreDamaged(StoreError):
    """LMDB's own pages are damaged: what the store holds can no longer be found in it."""


class StoreStuck(StoreError):
    """The write lock could not be had within its deadline: another process holds it."""


class StoreUnavailable(StoreError):
    """The process that owns the store cannot be reached over its socket."""


class StoreGap(StoreError):
    """A save named a base that is not stored (evicted meanwhile): save from token 0 instead."""
