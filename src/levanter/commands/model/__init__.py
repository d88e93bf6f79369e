"""The model of a run: its source, its description without memory, its loading and its adapters."""
