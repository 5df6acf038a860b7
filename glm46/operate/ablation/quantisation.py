"""Error of each FP8 product of a trained model, on its own weights and one batch of held-out text."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from glm46.compute.model.layers import Linear
from glm46.compute.parallelize import float8
from glm46.config.errors import UserError
from glm46.engine.inference.loading import load_for_inference
from glm46.operate.ablation.figures import RESULTS
from glm46.run.plan import Plan
from glm46.run.schedule import schedule_value
from glm46.storage.data.loader import BatchLayout, ValidationStream
from glm46.storage.data.manifest import load_manifest

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""See `Linear.product` and `Experts.product`."""


def measure_quantisation(plan: Plan, step: Path, device: torch.device) -> dict[str, dict[str, float]]:
    """The relative errors of the products that [float8] converts: norm of the difference to the product of the same
    operands in FP32, over the norm of that. The operands are those of a forward and a backward of one micro-batch in
    training.mixed_precision_param, without the errors of other products.

    Args:
        plan: on one process.
        step: step folder with the weights.

    Returns:
        By name of the product, such as ``layers.1.self_attn.q_proj``, the error of each of `RESULTS`.

    Raises:
        UserError: the checkpoint or the text cannot be read, or no text is held out.
    """
    config = plan.config
    dtype = getattr(torch, config.training.mixed_precision_param)
    model, _ = load_for_inference(step, tokenizer=config.model.tokenizer_path, dtype=dtype, device=device)
    float8.apply(model, plan)
    errors: dict[str, dict[str, float]] = {}
    for name, module in model.named_modules():
        if "product" in vars(module):
            exact = type(module).product
            module.product = partial(_measure, name, module, module.product, exact, errors)
    model.requires_grad_(False)
    model.get_parameter("embed_tokens.weight").requires_grad_(
        True
    )  # gradients reach every layer; those of the weights are not kept
    batch = {key: value.to(device) for key, value in _batch(plan).items()}
    output = model(**batch)
    weight = schedule_value(config.mtp.loss_weight, plan.end_tokens) / max(len(output.mtp_losses), 1)
    (output.loss + weight * output.mtp_losses.sum()).backward()
    return errors


def _batch(plan: Plan) -> dict[str, Tensor]:
    """Arguments of the model for the first micro-batch of validation of the first source that holds out text."""
    training, masked = plan.config.training, plan.config.data.document_mask
    layout = BatchLayout(training.seq_len, plan.shape.num_nextn_predict_layers, training.local_batch_size, 0, 1, masked)
    for source in plan.config.data.sources:
        manifest = load_manifest(Path(source.path), full=False)
        for batch in ValidationStream(manifest, layout, max_batches=1):
            names = ["input_ids", "positions", "labels"]
            names += ["mtp_input_ids", "mtp_labels"] if layout.mtp_depth else []
            names += ["document_ids"] if masked else []
            return {name: batch[name] for name in names} | {"is_real": batch["document_ids"] >= 0}
    raise UserError("no source holds out text; prepare one with held_out above 0")


def _measure(
    name: str,
    module: nn.Module,
    converted: Product,
    exact: Product,
    errors: dict[str, dict[str, float]],
    x: Tensor,
    weight: Tensor,
    third: Tensor | None,
) -> Tensor:
    """The exact product in place of the converted one, which is compared with it once its gradient is known.

    Args:
        third: the bias of a linear layer, which is not rounded; the offsets of experts.
    """
    y = exact(x, weight, third)
    if not isinstance(module, Linear):
        name = f"{name}.{next(own for own, value in module.named_parameters() if value is weight)}"
    errors[name] = {}  # in the order of the forward
    other, rows = (None, len(x)) if isinstance(module, Linear) or third is None else (third, int(third[-1]))
    operands = x.detach()[:rows], weight.detach()

    def compare(grad: Tensor) -> None:
        grad = grad[:rows]  # no expert has the others
        found = _results(converted, operands, grad, other)
        wanted = _results(exact, [operand.float() for operand in operands], grad.float(), other)
        errors[name] = {
            result: ((ours.float() - true).norm() / true.norm().clamp(min=torch.finfo(torch.float32).tiny)).item()
            for result, ours, true in zip(RESULTS, found, wanted, strict=True)
        }

    y.register_hook(compare)
    return y


def _results(product: Product, operands, grad: Tensor, third: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Output and both gradients of a product."""
    x, weight = (operand.detach().requires_grad_(True) for operand in operands)
    with torch.enable_grad():
        y = product(x, weight, third)
    of_x, of_weight = torch.autograd.grad(y, (x, weight), grad)
    return y.detach(), of_x, of_weight
