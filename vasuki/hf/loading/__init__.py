"""Loading: a folder or hub id becomes a model that is ready to run.

load_model    the model, or a refusal that names what is missing
tokenizer     text and messages -> token ids -> text
weights       those that live on the host
"""
