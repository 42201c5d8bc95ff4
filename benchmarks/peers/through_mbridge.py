"""The conversions of ``bench.convert`` by mbridge: the whole model, in Megatron's modules.

``python -m benchmarks.peers.through_mbridge to-megatron HF OUT``, or ``to-hf CKPT HF OUT``

mbridge builds its models of Transformer Engine's layers, which need CUDA; where there is none, the
subclass below gives it this package's layers. No random initialization, which would be overwritten.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoConfig

from qurl_megatron.config import ParallelConfig
from qurl_megatron.model.spec import decoder_spec
from qurl_megatron.runtime.megatron import megatron_runtime


def bridge_for(hf: Path):
    from mbridge.models.qwen2 import Qwen2Bridge

    class OnCpu(Qwen2Bridge):
        def _build_config(self):
            return self._build_base_config(
                add_qkv_bias=True,
                masked_softmax_fusion=False,
                persist_layer_norm=False,
                gradient_accumulation_fusion=False,
                use_cpu_initialization=True,
                perform_initialization=False,
            )

        def _get_transformer_layer_spec(self, vp_stage=None):
            self.has_vp_stage = True
            return decoder_spec(self.config, qk_norm=False)

        def _get_gptmodel_args(self):
            return {
                "vocab_size": self.hf_config.vocab_size,
                "max_sequence_length": 128,
                "position_embedding_type": "rope",
            }

        def _weight_name_mapping_mcore_to_hf(self, name):
            for own, theirs in (
                ("input_layernorm.weight", "input_layernorm"),
                ("pre_mlp_layernorm.weight", "post_attention_layernorm"),
            ):
                if name.endswith(own):
                    return [f"model.layers.{name.split('.')[2]}.{theirs}.weight"]
            return super()._weight_name_mapping_mcore_to_hf(name)

    return OnCpu(AutoConfig.from_pretrained(hf), dtype=torch.bfloat16)


def main(direction: str, *folders: str) -> int:
    from megatron.core import dist_checkpointing

    *source, hf, out = (Path(folder) for folder in (*folders,))
    out.mkdir(parents=True)
    # One process needs no port to meet at, which another program may have.
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    with megatron_runtime(ParallelConfig()), torch.no_grad():
        bridge = bridge_for(hf)
        models = bridge.get_model(bf16=False)
        state = models[0].sharded_state_dict
        if direction == "to-megatron":
            bridge.load_weights(models, str(hf), memory_efficient=True)
            dist_checkpointing.save({"model": state()}, str(out))
        else:
            loaded = dist_checkpointing.load(state(), str(source[0]))
            models[0].load_state_dict(loaded, strict=False)
            bridge.safetensor_io = bridge._get_safetensor_io(str(hf))
            bridge.save_weights(models, str(out))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
