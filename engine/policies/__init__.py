"""Who comes first."""

from plait.engine.config import EngineConfig
from plait.engine.outlook import Outlook
from plait.engine.policies.base import Policy
from plait.engine.policies.fair import Fair
from plait.engine.policies.order import Priority, Spt
from plait.engine.policies.slo import Default, Slo

POLICIES: dict[str, type[Policy]] = {
    "default": Default,
    "fcfs": Policy,
    "spt": Spt,
    "priority": Priority,
    "fair": Fair,
    "slo": Slo,
}


def make_policy(config: EngineConfig, outlook: Outlook) -> Policy:
    return policy_class(config.policy)(config, outlook)


def policy_class(name: str) -> type[Policy]:
    if name not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, not {name!r}")
    return POLICIES[name]
