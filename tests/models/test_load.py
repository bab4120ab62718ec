"""From hub ids, folders, GGUF files and built models to runners."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf as gguf_writer
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from cbengine.attention import AttentionSettings
from cbengine.errors import InvalidRequestError, UnsupportedFeatureError
from cbengine.models import gguf
from cbengine.models.load import inspect, load
from tests.models.paged import Paged, prompts_of, reference
from tests.models.tiny import tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama with a tokenizer, as a local folder."""
    tiny("llama").save_pretrained(tmp_path / "toy")
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "toy")
    return tmp_path / "toy"


def test_folder(folder: Path) -> None:
    loaded = load(folder)
    assert loaded.name == str(folder) == loaded.runner.spec.name
    assert loaded.runner.model.dtype == torch.float32
    assert loaded.tokenizer is not None
    assert loaded.tokenizer("w7")["input_ids"] == [7]
    prompts = prompts_of([9])
    expected = reference(tiny("llama"), prompts[0], 4)[0]
    assert Paged(loaded.runner).generate(prompts, 4)[0].tokens == expected


def test_options(folder: Path) -> None:
    loaded = load(str(folder), dtype="bfloat16", attention="eager", with_tokenizer=False, max_position_embeddings=99)
    assert loaded.runner.model.dtype == loaded.runner.spec.kv_dtype == torch.bfloat16
    assert loaded.runner.attention.name == "eager"
    assert loaded.tokenizer is None
    assert loaded.runner.spec.max_model_len == 99
    assert load(folder, dtype=torch.float16).runner.spec.kv_dtype == torch.float16
    with pytest.raises(InvalidRequestError, match="dtype must be"):
        load(folder, dtype="int8")
    with pytest.raises(UnsupportedFeatureError, match="unknown attention backend"):
        load(folder, attention="magic")


def test_the_checkpoint_may_be_in_another_dtype(folder: Path) -> None:
    tiny("llama").bfloat16().save_pretrained(folder)
    assert load(folder).runner.model.dtype == torch.float32
    assert load(folder, dtype="auto").runner.model.dtype == torch.bfloat16


def test_a_folder_without_a_tokenizer_is_for_token_ids(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    assert load(tmp_path).tokenizer is None


def test_a_broken_tokenizer_is_an_error(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises((OSError, ValueError), match=r"EOF|Expecting|JSON|parse|column"):
        load(folder)


def test_weights_that_are_not_complete_are_an_error(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    for part in (b"", whole[:5], whole[: len(whole) // 2]):
        (folder / "model.safetensors").write_bytes(part)
        with pytest.raises(OSError, match="toy: a file of its weights is broken or not complete"):
            load(folder)


def test_a_plan_knows_a_backend_that_cannot_serve(folder: Path) -> None:
    assert inspect(folder, attention=AttentionSettings("eager")).weight_bytes > 0
    with pytest.raises(UnsupportedFeatureError, match="unknown attention backend 'magic'"):
        inspect(folder, attention=AttentionSettings("magic"))
    with pytest.raises(UnsupportedFeatureError, match="unknown attention backend 'magic'"):
        inspect(tiny("llama"), attention=AttentionSettings("magic"))


def test_missing_models_are_transformers_errors(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        load(str(tmp_path / "nowhere"))
    with pytest.raises(OSError):
        load("nobody/nothing-of-this-name")
    with pytest.raises(FileNotFoundError, match=r"no such GGUF file"):
        load(tmp_path / "nothing.gguf")


def test_refused_before_the_weights_are_read(tmp_path: Path) -> None:
    from transformers import T5Config

    T5Config().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedFeatureError, match="encoder-decoder"):
        load(tmp_path)


def test_built_model_is_used_as_it_is() -> None:
    model = tiny("llama")
    loaded = load(model)
    assert loaded.runner.model is model
    assert loaded.tokenizer is None
    assert loaded.name == "LlamaForCausalLM"
    load(model, dtype="float32", device="cpu")
    for options, message in (
        ({"dtype": "bfloat16"}, "dtype='bfloat16' does not fit"),
        ({"device": "meta"}, "device='meta' does not fit"),
        ({"revision": "main", "token": "x"}, "revision, token: not for a model"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            load(model, **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="got int"):
        load(7)  # type: ignore[arg-type]


def test_built_model_finds_the_tokenizer_that_it_was_loaded_beside(folder: Path) -> None:
    loaded = load(load(folder).runner.model)
    assert loaded.tokenizer is not None
    assert loaded.name == str(folder)
    lost = load(folder).runner.model
    lost.config._name_or_path = "nobody/nothing-of-this-name"
    assert load(lost).tokenizer is None


def write_gguf(path: Path, model: PreTrainedModel) -> None:
    """A tiny Llama as llama.cpp would store it: unquantised, constants in float32, a tokenizer of single characters."""
    config: Any = model.config
    writer = gguf_writer.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    alphabet = ["<pad>", "<s>", "</s>", *(chr(i) for i in range(33, 127)), "Ġ", "ab", "Ġ1"]
    tokens = alphabet + [f"<unused{i}>" for i in range(config.vocab_size - len(alphabet))]
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b", "Ġ 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in model.state_dict().items():
        writer.add_tensor(gguf_name(name), as_llama_cpp(name, tensor, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    renamed = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
    }
    renamed |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    renamed |= {f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"} | {"self_attn.o_proj": "attn_output"}
    renamed |= {f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")}
    for old, new in renamed.items():
        name = name.replace(old, new)
    return name


def as_llama_cpp(name: str, tensor: torch.Tensor, config: Any) -> np.ndarray:
    """llama.cpp stores the rotary halves of queries and keys interleaved."""
    for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
        if part in name:
            rows, width = tensor.shape
            tensor = tensor.view(heads, 2, rows // heads // 2, width).transpose(1, 2).reshape(rows, width)
    return tensor.contiguous().numpy()


def test_gguf_file(tmp_path: Path) -> None:
    model = tiny("llama")
    model.config.rms_norm_eps = 1e-5
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-5  # type: ignore[assignment]
    path = tmp_path / "toy.gguf"
    write_gguf(path, model)
    loaded = load(path)
    network: Any = loaded.runner.model
    assert network.model.norm.variance_epsilon == network.config.rms_norm_eps == 1e-5
    assert loaded.runner.spec.eos_token_ids == (2,)
    assert loaded.runner.spec.kv_dtype == torch.float32
    prompts = prompts_of([9, 20])
    expected = [reference(model, prompt, 4)[0] for prompt in prompts]
    assert [request.tokens for request in Paged(loaded.runner).generate(prompts, 4)] == expected
    assert loaded.tokenizer is not None
    # The rule that transformers loses: a blank before a digit is a token of its own, as each digit is.
    assert loaded.tokenizer("ab 12", add_special_tokens=False).tokens()[-3:] == ["Ġ", "1", "2"]
    assert load(str(path), dtype="bfloat16", with_tokenizer=False).runner.model.dtype == torch.bfloat16


def test_gguf_needs_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(gguf, "_PACKAGES", ("gguf", "no_such_package"))
    with pytest.raises(UnsupportedFeatureError, match=r"no_such_package: pip install 'cbengine\[gguf\]'"):
        load(tmp_path / "toy.gguf")
    monkeypatch.undo()
    with pytest.raises(InvalidRequestError, match="which holds its own"):
        load(tmp_path / "toy.gguf", quantization_config=object())


def test_float32_constants_become_what_was_meant() -> None:
    for meant in (1e-5, 1e-6, 1.25e-5, 0.0, 1.0):
        assert gguf.undo_float32(float(np.float32(meant))) == meant
