"""Conventions: which windows a study takes and which p_z it reports. Results of different conventions do not compare.

`levanter`: no BOS, the full vocabulary, every fifth token. `paper`: the extraction studies (Cooper et al.,
arXiv:2505.12546), in which BOS is the first of the 100 tokens, tokens are sampled from the 40 most likely at
temperature 1, a window begins at every tenth character of the book, and repeated windows are left out.
Without a preset, the defaults of the upstream script hold: every tenth character, no BOS, the full vocabulary.
"""

from dataclasses import dataclass, field, replace

from levanter.memorization.results import FULL, TOP_40, Scheme
from levanter.memorization.windows import Windowing

CUSTOM = "custom"


@dataclass(frozen=True, kw_only=True)
class WindowConvention:
    """The windows of a book, and the scheme whose p_z is reported first."""

    windowing: Windowing = field(default_factory=Windowing)
    scheme: Scheme = FULL


PRESETS: dict[str, WindowConvention] = {
    "levanter": WindowConvention(windowing=Windowing(token_mode=True, stride_tokens=5)),
    "paper": WindowConvention(windowing=Windowing(slice_chars=800, bos=True, drop_duplicates=True), scheme=TOP_40),
}
UPSTREAM_DEFAULTS = WindowConvention()


def convention(preset: str | None, *, scheme: Scheme | None = None, **windowing: object) -> WindowConvention:
    """A preset (or upstream's defaults) with some settings changed.

    Args:
        preset: a name in `PRESETS`; None for upstream's defaults.
        scheme: another scheme.
        windowing: fields of `Windowing` to change.

    Raises:
        ValueError: there is no such preset.
    """
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"preset: {preset!r} is not one of {', '.join(PRESETS)}")
    base = UPSTREAM_DEFAULTS if preset is None else PRESETS[preset]
    return WindowConvention(windowing=replace(base.windowing, **windowing), scheme=scheme or base.scheme)


def preset_name(settings: WindowConvention) -> str:
    """The preset that matches `settings`, or `custom`; settings that the mode does not use are not compared."""
    return next((name for name, preset in PRESETS.items() if _relevant(preset) == _relevant(settings)), CUSTOM)


def _relevant(settings: WindowConvention) -> WindowConvention:
    # A stride or slice of the other mode has no effect, so it must not turn a preset into `custom`.
    unused = {"stride_chars": 1, "slice_chars": 1} if settings.windowing.token_mode else {"stride_tokens": 1}
    return replace(settings, windowing=replace(settings.windowing, **unused))
