from typing import NamedTuple

from loco_fsdp.topology import HopCache, Hops


class Route(NamedTuple):
    hops: Hops | None
    reason: str | None


class HopGroups:
    def __init__(self):
        self._c = HopCache()

    def acquire(self, group, config):
        return Route(self._c.hops(group, config), None)

    def release(self):
        pass
