"""Computes steps: transformers models on torch. The only room that imports torch and transformers.

device/            names, memory and power of the device; settings of the process before torch is loaded
kernels/           attention, native code and copies; each kernel has a plain twin
kv/                the tensors behind the block pools, and what moves them between device and host
attention/         attention of packed chunks over paged blocks, called by the model's own layers
padded/            rectangles of rows and columns, for models that know no packed attention
encoders/          models whose tokens attend to both sides: texts as wholes, side by side
recurrent/         layers that carry a state, and the states of the rows
fused/, cpu/       what takes the place of a model's modules: fewer operators of torch on a GPU, kernels on a CPU
cuda/              recorded steps on a GPU
loading/           a folder or hub id -> a model and its tokenizer, or a refusal that names what is missing
sampler            logits -> token ids; last_layer: of sampled tokens only; processors: what settings do
                   to logits; constraints: tokens that answers allow; reading: what is said of given tokens
ragged_executor    one packed forward a step, or padded ones, behind `engine.loop.Executor`
profiler/          `vasuki profile`
"""

from vasuki.hf.device import host

host.prepare()
