"""A small model of each design of torchaudio but ``SquimSubjective``, which is a WavLM with two small heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .case import Case

_FRAMES, _BINS, _SAMPLES, _LENGTH, _CLASSES = 24, 16, 1600, 6, 5
_ENCODER: dict[str, Any] = {
    "extractor_mode": "group_norm",
    "extractor_conv_layer_config": [(16, 10, 5), (16, 3, 2), (16, 2, 2)],
    "extractor_conv_bias": False,
    "encoder_embed_dim": 32,
    "encoder_projection_dropout": 0.1,
    "encoder_pos_conv_kernel": 4,
    "encoder_pos_conv_groups": 2,
    "encoder_num_layers": 4,
    "encoder_num_heads": 4,
    "encoder_attention_dropout": 0.1,
    "encoder_ff_interm_features": 64,
    "encoder_ff_interm_dropout": 0.0,
    "encoder_dropout": 0.1,
    "encoder_layer_norm_first": False,
}
"""Of wav2vec 2.0 and what is built like it."""
_MASKS: dict[str, Any] = {
    "mask_selection": "static",
    "mask_other": 0.0,
    "mask_length": 4,
    "no_mask_overlap": False,
    "mask_min_space": 1,
    "mask_channel_prob": 0.0,
    "mask_channel_selection": "static",
    "mask_channel_other": 0.0,
    "mask_channel_length": 4,
    "no_mask_channel_overlap": False,
    "mask_channel_min_space": 1,
}
"""Of HuBERT's pretraining, but for the share that is masked."""
_TRANSDUCER: dict[str, Any] = {
    "input_dim": _BINS,
    "encoding_dim": 32,
    "num_symbols": _CLASSES,
    "segment_length": 4,
    "right_context_length": 4,
    "time_reduction_input_dim": 8,
    "time_reduction_stride": 4,
    "transformer_num_heads": 4,
    "transformer_ffn_dim": 64,
    "transformer_num_layers": 4,
    "transformer_dropout": 0.1,
    "transformer_activation": "gelu",
    "transformer_left_context_length": 4,
    "transformer_max_memory_size": 0,
    "transformer_weight_init_scale_strategy": "depthwise",
    "transformer_tanh_on_mem": True,
    "symbol_embedding_dim": 16,
    "num_lstm_layers": 2,
    "lstm_layer_norm": True,
    "lstm_layer_norm_epsilon": 1e-3,
    "lstm_dropout": 0.1,
}
"""Of an RNN-T whose encoder is an Emformer."""


def cases() -> Iterator[Case]:
    """One model of each design."""
    import torchaudio  # noqa: F401  # says whether it is installed

    for name in _MODELS:
        yield Case("torchaudio", name, name, partial(make, name))


def make(name: str, rows: int, as_they_are: bool) -> tuple[nn.Module, dict[str, Any]]:
    """The model, and sounds, spectra or transcripts that are noise; with ``as_they_are`` it skips layers."""
    torch.manual_seed(0)
    return _MODELS[name](rows, as_they_are)


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _symbols(rows: int, length: int) -> Tensor:
    return torch.randint(0, _CLASSES, (rows, length), generator=torch.Generator().manual_seed(2))


def _lengths(rows: int, length: int, step: int = 1, dtype: torch.dtype = torch.long) -> Tensor:
    """Each row is as much shorter than the one before."""
    return (length - step * torch.arange(rows)).to(dtype)


def _letters(rows: int, _: bool) -> tuple[nn.Module, dict[str, Any]]:
    from torchaudio.models import Wav2Letter

    return Wav2Letter(_CLASSES, "mfcc", _BINS), {"x": _noise(rows, _BINS, 2 * _FRAMES)}


def _vocoder(rows: int, _: bool) -> tuple[nn.Module, dict[str, Any]]:
    from torchaudio.models import WaveRNN

    sizes = {"n_res_block": 3, "n_rnn": 16, "n_fc": 16, "n_freq": _BINS, "n_hidden": 16, "n_output": 16}
    model, hop = WaveRNN([2, 3, 2], n_classes=8, hop_length=12, **sizes), 12
    waves = _noise(rows, 1, (_FRAMES - 4) * hop)
    return model, {"waveform": waves, "specgram": _noise(rows, 1, _BINS, _FRAMES)}


def _separator(rows: int, _: bool) -> tuple[nn.Module, dict[str, Any]]:
    from torchaudio.models import ConvTasNet

    model = ConvTasNet(2, 4, 16, 3, 8, 16, msk_num_layers=3, msk_num_stacks=2)
    return model, {"input": _noise(rows, 1, 256)}


def _deep_speech(rows: int, _: bool) -> tuple[nn.Module, dict[str, Any]]:
    from torchaudio.models import DeepSpeech

    return DeepSpeech(_BINS, n_hidden=32, n_class=_CLASSES), {"x": _noise(rows, 1, _FRAMES, _BINS)}


def _wav2vec2(rows: int, skips: bool) -> tuple[nn.Module, dict[str, Any]]:
    from torchaudio.models import wav2vec2_model

    model = wav2vec2_model(**_ENCODER, encoder_layer_drop=0.1 * skips, aux_num_out=_CLASSES)
    return model, {"waveforms": _noise(rows, _SAMPLES)}


def _wav2vec2_of_lengths(rows: int, skips: bool) -> tuple[nn.Module, dict[str, Any]]:
    model, arguments = _wav2vec2(rows, skips)
    return model, {**arguments, "lengths": _lengths(rows, _SAMPLES, 100)}


def _wavlm(rows: int, skips: bool) -> tuple[nn.Module, dict[str, Any]]:
    from torchaudio.models import wavlm_model

    own = {"encoder_num_buckets": 16, "encoder_max_distance": 32}
    model = wavlm_model(**_ENCODER, **own, encoder_layer_drop=0.1 * skips, aux_num_out=_CLASSES)
    return model, {"waveforms": _noise(rows, _SAMPLES)}


def _hubert(rows: int, skips: bool) -> tuple[nn.Module, dict[str, Any]]:
    from torchaudio.models import hubert_pretrain_model

    own = {"skip_masked": False, "skip_nomask": False, "num_classes": _CLASSES, "final_dim": 16,
           "feature_grad_mult": 0.1, "mask_prob": 0.8, "encoder_layer_drop": 0.05 * skips}  # fmt: skip
    model = hubert_pretrain_model(**_ENCODER, **_MASKS, **own)
    frames = model.wav2vec2(_noise(1, _SAMPLES))[0].shape[1]
    return model, {"waveforms": _noise(rows, _SAMPLES), "labels": _symbols(rows, frames)}


def _tacotron(rows: int, _: bool) -> tuple[nn.Module, dict[str, Any]]:
    from torchaudio.models import Tacotron2

    widths = ("symbol_embedding_dim", "encoder_embedding_dim", "decoder_rnn_dim", "attention_rnn_dim",
              "attention_hidden_dim", "prenet_dim", "postnet_embedding_dim")  # fmt: skip
    model = Tacotron2(n_mels=_BINS, n_symbol=_CLASSES, **dict.fromkeys(widths, 16))
    return model, {
        "tokens": _symbols(rows, _LENGTH),
        "token_lengths": _lengths(rows, _LENGTH),
        "mel_specgram": _noise(rows, _BINS, 8),
        "mel_specgram_lengths": _lengths(rows, 8),
    }


def _conformer(rows: int, _: bool) -> tuple[nn.Module, dict[str, Any]]:
    from torchaudio.models import Conformer

    model = Conformer(_BINS, num_heads=4, ffn_dim=32, num_layers=4, depthwise_conv_kernel_size=3)
    return model, {"input": _noise(rows, _FRAMES, _BINS), "lengths": _lengths(rows, _FRAMES)}


def _emformer(rows: int, _: bool) -> tuple[nn.Module, dict[str, Any]]:
    from torchaudio.models import Emformer

    context = {"left_context_length": 4, "right_context_length": 2}
    model = Emformer(_BINS, num_heads=4, ffn_dim=32, num_layers=4, segment_length=4, **context)
    return model, {"input": _noise(rows, _FRAMES + 2, _BINS), "lengths": _lengths(rows, _FRAMES)}


def _transducer(rows: int, _: bool) -> tuple[nn.Module, dict[str, Any]]:
    from torchaudio.models import emformer_rnnt_model

    return emformer_rnnt_model(**_TRANSDUCER), {
        "sources": _noise(rows, _FRAMES + 4, _BINS),
        "source_lengths": _lengths(rows, _FRAMES + 4, 4, torch.int32),
        "targets": _symbols(rows, _LENGTH).int(),
        "target_lengths": _lengths(rows, _LENGTH, 1, torch.int32),
    }


def _demucs(rows: int, _: bool) -> tuple[nn.Module, dict[str, Any]]:
    from torchaudio.models import HDemucs

    return HDemucs(["one", "other"], channels=8, nfft=1024, depth=5), {"input": _noise(rows, 2, 4096)}


def _quality(rows: int, _: bool) -> tuple[nn.Module, dict[str, Any]]:
    from torchaudio.models import squim_objective_model

    model = squim_objective_model(16, 16, 16, 4, 16, num_blocks=2, rnn_type="LSTM", chunk_size=15)
    return model, {"x": _noise(rows, 800)}


_MODELS: dict[str, Callable[[int, bool], tuple[nn.Module, dict[str, Any]]]] = {
    "Wav2Letter": _letters,
    "WaveRNN": _vocoder,
    "ConvTasNet": _separator,
    "DeepSpeech": _deep_speech,
    "Wav2Vec2": _wav2vec2,
    "Wav2Vec2-of-lengths": _wav2vec2_of_lengths,
    "WavLM": _wavlm,
    "HuBERT-pretraining": _hubert,
    "Tacotron2": _tacotron,
    "Conformer": _conformer,
    "Emformer": _emformer,
    "RNN-T-of-Emformer": _transducer,
    "HDemucs": _demucs,
    "SquimObjective": _quality,
}
