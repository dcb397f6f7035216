"""The engine without Kafka: three prompts, one batch."""

from plait.engine.api import GenerationRequest, SamplingParams
from plait.engine.config import EngineConfig
from plait.engine.engine import Engine
from plait.engine.models import resolve
from plait.engine.tokenizer import Tokenizer

tokenizer = Tokenizer(resolve("smollm2"))
engine = Engine(EngineConfig(model="smollm2"))
prompts = ["The capital of France is", "Water boils at", "The opposite of hot is"]
outputs = engine.generate(
    GenerationRequest(prompt, tokenizer.encode(prompt), SamplingParams(max_tokens=8, temperature=0))
    for prompt in prompts
)
for prompt in prompts:
    print(prompt, "->", tokenizer.decode(outputs[prompt]))
