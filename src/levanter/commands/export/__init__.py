"""`export_lm_to_hf`: a checkpoint as a Hugging Face folder."""
