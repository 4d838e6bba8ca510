"""Writes a GGUF model as a Hugging Face folder in bf16, for engines that read safetensors. Usage: convert.py GGUF FOLDER"""

import json
import os
import pathlib
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

gguf, folder = pathlib.Path(sys.argv[1]).absolute(), pathlib.Path(sys.argv[2])
source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
# Without GgufConfig the weights would stay in the blocks of the GGUF file.
whole = GgufConfig(dequantize=True)
model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16, quantization_config=whole)
model.save_pretrained(folder)
AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
# Readers older than transformers 5 look for rope_theta at the top of the document.
path = folder / "config.json"
config = json.loads(path.read_text())
config.setdefault("rope_theta", config.get("rope_parameters", {}).get("rope_theta", 10000.0))
path.write_text(json.dumps(config, indent=2) + "\n")
print(f"{sum(p.numel() for p in model.parameters())} parameters")
