"""The bundled model in the GGUF types that the peers read: the same weights, dequantized once for all engines."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from plait.engine.models import bundled_gguf, resolve
from plait.kernels.build import cache_dir

TYPES = {
    "F16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "BF16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "Q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
FILE_TYPE = gguf.Keys.General.FILE_TYPE


def model_path(form: str) -> Path:
    """The model's folder for `form` "safetensors", else a GGUF file of this type, made on first use."""
    if form == "safetensors":
        return resolve("smollm2")
    target = cache_dir() / "peers" / "models" / f"SmolLM2-135M-Instruct.{form}.gguf"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(".part")
        requantize(bundled_gguf(cache_dir() / "models"), part, *TYPES[form])
        part.rename(target)
    return target


def requantize(
    source: Path, target: Path, kind: gguf.GGMLQuantizationType, file_type: gguf.LlamaFileType
) -> None:
    """A copy of a GGUF file whose matrices have another type; vectors stay in fp32."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields[gguf.Keys.General.ARCHITECTURE].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name == gguf.Keys.General.ARCHITECTURE or field.name.startswith("GGUF."):
            continue
        value = int(file_type) if field.name == FILE_TYPE else field.contents()
        writer.add_key_value(field.name, value, field.types[0], sub_type=field.types[-1])
    for tensor in reader.tensors:
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if weights.ndim == 1:
            writer.add_tensor(tensor.name, weights)
        else:
            writer.add_tensor(tensor.name, gguf.quants.quantize(weights, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
