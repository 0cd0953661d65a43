"""`pipeline.host_sync`: the host waits at the end of every pass, as Megatron-LM's timers make it."""

from perfmodel.api import Predictor

MODEL = {
    "kind": "transformer", "name": "gpt", "architecture": "gpt2", "implementation": "megatron", "batch_size": 4,
    "precision": "bf16", "optimizer": "sgd", "vocab_size": 512, "hidden_size": 128, "layers": 4, "heads": 4,
    "max_positions": 64, "attention": "eager",
}  # fmt: skip
PLAN = "tp=2,pp=2,micro_batches=4,data_parallel.reduce=after_backward"


def test_every_pass_ends_with_a_wait_and_takes_no_less_time() -> None:
    predictor = Predictor(model=MODEL, topology="dgx_a100")
    free, synced = predictor.run(PLAN), predictor.run(f"{PLAN},pipeline.host_sync=true")
    for lowered in synced.classes:
        waits = [e for e in lowered.rank_class.events if e.op is not None and e.op.host_sync]
        passes = 2 * 4  # forward and backward of four micro-batches
        assert len(waits) == passes
    assert not any(e.op is not None and e.op.host_sync for c in free.classes for e in c.rank_class.events)
    assert synced.prediction.iteration_time_s > free.prediction.iteration_time_s


def test_a_single_stage_waits_too() -> None:
    plan = "tp=2,accumulate=2,data_parallel.reduce=after_backward"
    predictor = Predictor(model=MODEL, topology="dgx_a100")
    free, synced = (predictor.predict(text).iteration_time_s for text in (plan, f"{plan},pipeline.host_sync=true"))
    assert synced > free
