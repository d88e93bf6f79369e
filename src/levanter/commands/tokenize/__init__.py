"""`cache_dataset`: token stores, built ahead of a run."""
