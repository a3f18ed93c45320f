"""Checkpoints of Transformers, loaded whole or refused.

Transformers draws at random what a checkpoint lacks, and passes over what its class has no place for. Both go without
an error, and the model then says something else than the one that will be served. The rule here:

  missing, or of another shape  refused. A tied tensor is there where its other name is; config.json says what is tied.
                                An output head that differs from the embedding it is said to be tied to is kept, as
                                Transformers and vLLM do
  without a place               refused in the text model's own parts: a bias, norm or scale that config.json does not
                                know of, a layer beyond the depth it names. Passed over where nothing that writes text
                                reads it: MTP layers, towers of other modalities, buffers of older versions, and what
                                the model's class itself names as unused
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from typing import Any

from safetensors import SafetensorError

from spec_train.errors import UserError

# Parts of a checkpoint that no text goes through, by what their names begin with, and buffers of older versions.
_OTHER_PARTS = re.compile(
    r"(^|\.)(mtp|nextn|vision|visual|image|audio|video|speech|mm_|multi_?modal)"
    r"|inv_freq$|(cos|sin)_cached$|masked_bias$|\.(attn|attention|self_attn)\.bias$|position_ids$"
)
_MTP_PARTS = re.compile(r"(^|\.)(eh_proj|enorm|hnorm|shared_head)\.")
_QUANTISATION = re.compile(r"(scale|zero_point|_inv|amax)\w*$")  # transformers says which of these it reads


def load_whole(auto: Any, name: str, where: str, **settings: Any) -> Any:
    """`auto.from_pretrained(name, ...)`, every tensor of it out of the checkpoint.

    `where`: what begins the line of an error, such as "target.model NAME". Raises UserError for tensors that are
    missing, misshapen or without a place (see the module), and for a damaged file; OSError as Transformers does.
    """
    log, table = logging.getLogger("transformers.modeling_utils"), _Table()
    log.addFilter(table)
    try:
        model, report = auto.from_pretrained(
            name, output_loading_info=True, ignore_mismatched_sizes=True, low_cpu_mem_usage=True, **settings
        )
    except SafetensorError as error:
        raise UserError(f"{where}: a weight file is damaged ({error}); fetch it again") from None
    except RuntimeError as error:
        if "conversion" not in str(error):
            raise
        raise UserError(
            f"{where}: {_some(table.unconverted)} cannot be put together out of the checkpoint, whose parts of it are "
            "not all there or not of one shape; fetch it again"
        ) from error
    finally:
        log.removeFilter(table)
    missing, unread = sorted(report["missing_keys"]), without_a_place(model, report["unexpected_keys"])
    if missing:
        raise UserError(
            f"{where}: the checkpoint lacks {_some(missing)}, which would be drawn at random; {_mend(missing)}"
        )
    for tensor, found, wanted in sorted(report["mismatched_keys"]):
        raise UserError(
            f"{where}: {tensor} has shape {list(found)}, config.json asks for {list(wanted)}; fetch both again"
        )
    if unread:
        raise UserError(
            f"{where}: the checkpoint holds {_some(unread)}, for which its config.json has no place, so the model "
            "would run without; use the config.json that belongs to these weights"
        )
    return model


class _Table(logging.Filter):
    """Keeps back the table in which Transformers logs such tensors: they are judged, and named in one line, here."""

    def __init__(self) -> None:
        super().__init__()
        self.unconverted: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if "LOAD REPORT" not in text:
            return True
        self.unconverted = re.findall(r"^(\S.*?) +\| +\S*CONVERSION", text, re.MULTILINE)
        return False


def without_a_place(model: Any, unexpected: Collection[str]) -> list[str]:
    """Those of the `unexpected` tensors of a checkpoint that belong to the text model and are not read, sorted."""
    names = {id(module): name for name, module in model.named_modules()}
    decoder = model.get_decoder()
    decoder = getattr(decoder, "language_model", decoder)
    inside = f"{names[id(decoder)]}."
    parts = (inside, f"{names[id(model.get_output_embeddings())]}.")
    quantised = getattr(model.config, "quantization_config", None) is not None
    depth = int(model.config.get_text_config().num_hidden_layers)
    found = sorted(name for name in unexpected if name.startswith(parts))
    mtp_layers = {_layer(name) for name in found if (_layer(name) or 0) >= depth and _MTP_PARTS.search(name)}
    return [
        name
        for name in found
        if not _OTHER_PARTS.search(name.removeprefix(inside))
        and not (quantised and _QUANTISATION.search(name))
        and _layer(name) not in mtp_layers - {None}
    ]


def _layer(name: str) -> int | None:
    """The number of the layer that a tensor belongs to, the first number in its name."""
    found = re.search(r"\.(\d+)\.", name)
    return int(found[1]) if found else None


def _some(names: list[str]) -> str:
    """The first three names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _mend(missing: list[str]) -> str:
    if all("lm_head" in name or "embed_out" in name for name in missing):
        return "fetch it again, or say tie_word_embeddings in config.json where the embedding is the output head"
    return "fetch it again, with the config.json that belongs to it"
