"""kernreg: interchangeable GPU kernels behind documented ops, chosen by a policy in a file."""

from kernreg import ops, ranks
from kernreg.contract import Backend, Case, ContractError, Fact, Kernel, Op, RegistrationError, Tensor, Variant, op
from kernreg.device import Device
from kernreg.dispatch import NotCapturable, NotWarm, Plan, Served, WarmupError, bind, default_policy, force, served
from kernreg.policy import Decision, Policy, PolicyError
from kernreg.ranks import RanksDisagree
from kernreg.registry import Registry, UnknownError

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "Case",
    "ContractError",
    "Decision",
    "Device",
    "Fact",
    "Kernel",
    "NotCapturable",
    "NotWarm",
    "Op",
    "Plan",
    "Policy",
    "PolicyError",
    "RanksDisagree",
    "RegistrationError",
    "Registry",
    "Served",
    "Tensor",
    "UnknownError",
    "Variant",
    "WarmupError",
    "bind",
    "default_policy",
    "force",
    "op",
    "ops",
    "ranks",
    "served",
]
