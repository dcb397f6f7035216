"""The engine says where its time goes, and all of it is somewhere."""

from plait.engine.api import GenerationRequest, SamplingParams
from plait.engine.config import EngineConfig
from plait.engine.engine import Engine
from tiny_models import tiny, tiny_llama_config


def test_every_part_of_a_run_is_counted_and_none_twice() -> None:
    engine = Engine(EngineConfig(num_blocks=16, max_running=4), tiny(tiny_llama_config(), attn="plait"))
    engine.generate([GenerationRequest("a", [1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))])
    time = engine.stats().time
    spent = {"scheduling", "model", "sampling", "norm", "product", "rotary", "attention"}
    assert set(time) == {*spent, "swapping"}
    assert all(time[name] > 0 for name in spent) and time["swapping"] == 0, "nothing was preempted"
    whole = sum(engine.watch.seconds.values())
    assert abs(sum(time.values()) - whole) < 1e-9 * len(time) + 1e-6
