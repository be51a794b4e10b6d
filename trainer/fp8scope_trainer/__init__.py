"""A small, readable FP8 ZeRO trainer on PyTorch's own engine (FSDP2, DTensor).

For a model of your own:

    from fp8scope_trainer.convert import Conversion, convert         linears to FP8, in place
    from fp8scope_trainer.shard import shard                         ZeRO stage
    from fp8scope_trainer.adamw import AdamW, parameter_groups       states in E4M3; Adam, SGD, Lion likewise
    from fp8scope_trainer.history import advance_histories           after each step, if scaling is delayed
    from fp8scope_trainer.checkpoint import load, save               on any number of ranks, to the bit

    report = convert(model)                    before sharding; print(report) is the precision map
    shard(model, stage=2)                      before the optimizer
    optimizer = AdamW(parameter_groups(model), lr=3e-4)

`fp8scope train` (train.py) does the same with the reference decoder (decoder.py).
"""
