"""`recipe`: nanochat's numbers from a depth, the documents of its stages, and their hours and dollars on a pod."""
