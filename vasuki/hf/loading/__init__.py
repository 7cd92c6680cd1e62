"""Loading: a folder or hub id becomes a model that is ready to run.

load_model        the model, or a refusal that names what is missing
loaded_model      a model that is ready to run
prepare           a model in memory: probed by a backend, and described
defaults          what its files say of generating
body              a model without its language head, for vectors and labels
known_types       whether transformers knows a model's type
accounting        which tensors its files lack, and which nothing reads
tokenizer         text and messages -> token ids -> text
plain_tokenizer   the same for planning, without transformers where its files are plain
tokenizer_files   what splits text by what the model's folder says, and its chat template
prompt_text       control tokens in rows' texts as text, and no second start token
reasoning         where a model thinks aloud, and where its answer begins
least_tokens      how few tokens a text may have, by its length alone
quantized         a model whose products are to have 8 bits
varying           what gives a row other numbers with other rows
weights           weights that live on the host
triton_kernels    Triton's kernels for a model, where they compile and agree with their twins
"""
