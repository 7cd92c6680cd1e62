"""A model as data.

shape              the sizes of a model
config_json        how config.json spells them; recurrent_config: the sizes of recurrent layers
launches           what a layer of a family launches on a GPU
named              well-known models by name
files              a model's folder, or its description from the hub
weight_files       what its weight files say they hold
fingerprint        which model it is, by the content of its files
mapped_weights     weights that a CPU reads from their files while it computes
dtypes             the type that it computes in
layout             how a model is spread over devices, and which weights live on the host
sentence           what its files say of vectors and labels
token_counter      counts tokens where there is no tokenizer
"""
