"""Documents of the old memorization scripts, with other texts, models and folders."""

# Keys and values as the old generation's 405B document has them; the text and the folders are other ones.
ONE_BOOK = """
book_title: "A Book"
txt_path: "books/a.txt"
prompt_tokens: 50
cursor_inc_chars: 10
slice_length: 2000
chunk_size: 100
token_mode: true
cursor_inc_tokens: 5
tokenizer_name: meta-llama/Llama-3.1-8B
model:
  type: llama
  seq_len: 101
  hidden_dim: 16384
  intermediate_dim: 53248
  num_layers: 126
  num_heads: 128
  num_kv_heads: 8
  flash_attention_block_size: 512
  use_bias: false
  use_layer_norm_weight: true
  initializer_range: 0.02
  rope:
    type: "llama3"
trainer:
  seed: 0
  tracker:
    type: wandb
    project: "books"
    tags: ["llama3", "eval"]
    name: "a_run"
  mp: p=f32,c=f32
  per_device_eval_parallelism: -1
  tensor_parallel_axes: ["mlp", "heads"]
  batch_axis: "batch"
  model_axis_size: 128
eval_batch_size: 1
output_base_path: "gs://bucket/books/"
plot_path: "bar_plot.png"
histogram_path: "histogram.png"
pz_data_path: "pz_data.npz"
initialize_from_hf: "/models/Llama-3-1-405B"
use_hf_model_config: False
"""

SHARED = """
tokenizer_name: meta-llama/Llama-3.1-8B
model: {type: llama, seq_len: 101, hidden_dim: 4096, num_heads: 32, num_kv_heads: 8, rope: {type: llama3}}
trainer:
  mp: p=f32,c=f32
  tensor_parallel_axes: [mlp, heads]
  fsdp_axis: embed
  batch_axis: batch
initialize_from_hf: /models/Llama-3-1-8B
use_hf_model_config: false
chunk_size: 100
token_mode: true
cursor_inc_tokens: 5
eval_batch_size: 128
output_base_path: gs://bucket/8b/
"""

BOOKS = """
books:
  one: {txt_path: books/one.txt, book_title: One}
  two: {txt_path: books/two.txt, prompt_tokens: 80, eval_batch_size: 64}
"""
