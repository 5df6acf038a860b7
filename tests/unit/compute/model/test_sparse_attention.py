"""Sparse attention equals `GlmMoeDsaForCausalLM` of transformers, and its parts equal plain formulas."""

import copy

import pytest
import torch
import torch.nn.functional as F
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM
from transformers.modeling_layers import MtpLayer
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaDecoderLayer, GlmMoeDsaRMSNorm

from glm46.compute.model import indexer, masked_attention, sparse_attention
from glm46.compute.model.attention_layout import attention_layout
from glm46.compute.model.attention_runs import plain_attention, plain_attention_backward
from glm46.compute.model.indexer import Indexer, best_keys, choose_keys, index_scores, key_spans
from glm46.compute.model.rope import rotary_tables, rotate
from glm46.compute.model.router import RoutingOptions
from glm46.compute.model.sparse_attention import SparseLatentAttention, chosen_attention
from glm46.config.presets import PRESETS, indexer_types
from glm46.run.context_keys import longest_masked
from tests.builders import random_batch, random_model, tiny_shape

# FP32 has 6e-8 of rounding; some hundred operations in another order give about 1e-6.
TOLERANCE = 1e-5

SPARSE = dict(
    num_hidden_layers=5, hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=40, q_lora_rank=40,
    kv_lora_rank=32, qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=40, use_qk_norm=False, attention_bias=False,
    partial_rotary_factor=1.0, num_nextn_predict_layers=0, index_n_heads=8, index_head_dim=32, index_topk=8,
)  # fmt: skip
SHARED = indexer_types(5, frequency=2, offset=2)
LENGTH = 65


def sparse_shape(**changes):
    return tiny_shape(**SPARSE | changes)


def reference_of(model):
    """transformers' model with the weights of ours."""
    shape = model.shape
    keys = shape.model_dump(exclude={"rope_scaling", "sliding_window", "rope_theta", "partial_rotary_factor"})
    types = shape.indexer_types or ("full",) * shape.num_hidden_layers
    dense = ["dense"] * shape.first_k_dense_replace
    config = GlmMoeDsaConfig(
        **keys | {"head_dim": shape.qk_rope_head_dim, "indexer_types": list(types)},
        mlp_layer_types=dense + ["sparse"] * (shape.num_hidden_layers - len(dense)),
        rope_parameters=dict(rope_theta=shape.rope_theta, rope_type="default"),
        attn_implementation="eager",
    )
    reference = GlmMoeDsaForCausalLM(config).float()
    for name, module in reference.named_modules():
        if name.endswith("_a_layernorm"):  # its class default; servers take the value of config.json
            module.variance_epsilon = shape.rms_norm_eps
    targets = paired(reference)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    assert set(targets) == set(tensors)
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(tensors[name])
    return reference


def paired(reference):
    """Our name -> transformers' parameter or buffer."""
    tensors = [*reference.named_parameters(), *reference.named_buffers()]
    return {_our_name(name): tensor for name, tensor in tensors if "inv_freq" not in name}


def _our_name(name):
    name = name.removeprefix("model.").replace(".mlp.gate.", ".mlp.router.").replace(".gate_up_proj", ".gate_up")
    return name.replace(".experts.down_proj", ".experts.down")


class Choices:
    """Records what our indexers choose, and lets those of transformers choose the same keys.

    Scores that are equal, often 0, or closer than FP32 rounds have no certain order; so each key that only transformers
    chose must have a score within `TOLERANCE` of the lowest chosen one.
    """

    def __init__(self, monkeypatch):
        self.made = []
        self.largest_gap = 0.0
        monkeypatch.setattr(sparse_attention, "choose_keys", self._choose)

    def _choose(self, q, k, weights, *spans_and_top_k):
        chosen = choose_keys(q, k, weights, *spans_and_top_k)
        self.made.append((chosen.long(), index_scores(q, k, weights)))
        return chosen

    def give_to(self, reference):
        """Replay the recorded choices, in the order of the layers."""
        remaining = iter(self.made)
        for layer in reference.model.layers:
            if layer.self_attn.indexer is not None:
                layer.self_attn.indexer.register_forward_hook(
                    lambda module, x, theirs: self._compare(theirs, *next(remaining))
                )

    def _compare(self, theirs, chosen, scores):
        rows, length, count = theirs.shape
        for query in range(rows * length):
            first = query - query % length
            ours = chosen[query][chosen[query] >= 0]
            wanted = theirs.flatten(0, 1)[query].long() + first
            only_theirs = set(wanted[wanted <= query].tolist()) - set(ours.tolist())
            for key in only_theirs:
                gap = (scores[query, key] - scores[query, ours].min()).abs().item()
                self.largest_gap = max(self.largest_gap, gap)
        first = torch.arange(rows).repeat_interleave(length).unsqueeze(1) * length
        # A later token, which the causal mask hides, stands for an absent key.
        local = (chosen - first).where(chosen >= 0, length - 1)
        return local.view(rows, length, -1)[..., :count].int()


def gradients(tensors):
    return {name: tensor.grad for name, tensor in tensors.items() if tensor.grad is not None}


def relative_error(actual, expected):
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("types", [None, SHARED], ids=["an indexer in each layer", "shared choices"])
@pytest.mark.parametrize("top_k", [8, 24, 40, LENGTH, 100])  # two of gathered rows, one with a mask, two dense
def test_logits_loss_and_every_gradient_equal_transformers(top_k, types, monkeypatch):
    model = random_model(sparse_shape(index_topk=top_k, indexer_types=types), seed=3)
    reference = reference_of(model)
    batch = random_batch(model.shape, length=LENGTH)
    our_logits = model(batch["input_ids"])
    choices = Choices(monkeypatch)
    sums = model(**batch)
    assert bool(choices.made) == (top_k < LENGTH)
    if choices.made:
        choices.give_to(reference)
    logits = reference(input_ids=batch["input_ids"], use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum")
    assert choices.largest_gap < TOLERANCE
    assert relative_error(our_logits, logits) < TOLERANCE
    assert relative_error(sums.loss, loss) < TOLERANCE
    sums.loss.backward()
    loss.backward()
    ours = gradients(dict(model.named_parameters()))
    theirs = gradients(paired(reference))
    # An indexer learns from a loss of its own: neither library gives it a gradient of this one.
    assert set(ours) == set(theirs)
    assert not any("indexer" in name for name in ours)
    errors = {name: relative_error(ours[name], theirs[name]) for name in ours}
    worst = max(errors, key=errors.get)
    assert errors[worst] < TOLERANCE, (worst, errors[worst])


@pytest.mark.parametrize("top_k", [16, 40, 100])
def test_a_prediction_layer_equals_the_pieces_of_transformers(top_k):
    """Piece by piece: `MtpModel` cannot build the layer of this model."""
    model = random_model(sparse_shape(index_topk=top_k, num_nextn_predict_layers=1), seed=1)
    shape = model.shape
    layers = shape.num_hidden_layers
    reference = reference_of(model)
    config = copy.deepcopy(reference.config)  # of one more layer, with an indexer and experts
    config.mlp_layer_types = [*config.mlp_layer_types, "sparse"]
    config.indexer_types = [*config.indexer_types, "full"]
    theirs = MtpLayer(config, GlmMoeDsaDecoderLayer, GlmMoeDsaRMSNorm, layers).float()
    for name in ("q_a_layernorm", "kv_a_layernorm"):
        getattr(theirs.mtp_block.self_attn, name).variance_epsilon = shape.rms_norm_eps
    ours = model.mtp["0"]
    renamed = {"block.": "mtp_block.", "norm.": "post_norm."}
    weights = {}
    for name, tensor in [*ours.named_parameters(), *ours.named_buffers()]:
        ours_of = next((prefix for prefix in renamed if name.startswith(prefix)), None)
        name = name.replace(".mlp.router.", ".mlp.gate.").replace(".experts.gate_up", ".experts.gate_up_proj")
        name = name.replace(".experts.down", ".experts.down_proj")
        weights[renamed[ours_of] + name.removeprefix(ours_of) if ours_of else name] = tensor
    theirs.load_state_dict(weights)
    generator = torch.Generator().manual_seed(2)
    hidden, embedding = torch.randn(2, 2, LENGTH, shape.hidden_size, generator=generator).unbind()
    positions = torch.arange(LENGTH).expand(2, -1)
    mask = torch.full((LENGTH, LENGTH), torch.finfo(torch.float32).min).triu(1).expand(2, 1, -1, -1)
    with torch.no_grad():
        x = theirs.eh_proj(torch.cat([theirs.enorm(embedding), theirs.hnorm(hidden)], dim=-1))
        rope = reference.model.rotary_emb(x, positions)
        x, *_ = theirs.mtp_block(x, attention_mask=mask, position_embeddings=rope, position_ids=positions)
        expected = theirs.post_norm(x)
        tables = rotary_tables(positions, shape, torch.float32)
        found, *_ = ours(hidden, embedding, tables, None, None, RoutingOptions())
        logits = model.lm_head(found)
        expected_logits = reference.lm_head(expected)
    assert relative_error(found, expected) < TOLERANCE
    assert relative_error(logits, expected_logits) < TOLERANCE


def packed(shape, lengths=(5, 31, 12, 22)):
    batch = random_batch(shape, rows=1, length=sum(lengths))
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)]).unsqueeze(0)
    positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    return batch, documents, positions


@pytest.mark.parametrize("types", [None, SHARED], ids=["an indexer in each layer", "shared choices"])
def test_packed_documents_equal_documents_alone_and_packed_transformers(types):
    model = random_model(sparse_shape(indexer_types=types), seed=1)
    batch, documents, positions = packed(model.shape)
    ids = batch["input_ids"]
    with torch.no_grad():
        logits = model(ids, document_ids=documents, positions=positions)
        alone = torch.cat([model(ids[documents == i].unsqueeze(0)) for i in range(4)], dim=1)
        theirs = reference_of(model)(input_ids=ids, position_ids=positions, use_cache=False).logits
        crossing = model(ids, positions=positions)
    assert relative_error(logits, alone) < TOLERANCE
    assert relative_error(logits, theirs) < TOLERANCE
    assert relative_error(crossing, theirs) > 1e-3


def test_documents_without_more_keys_than_are_chosen_run_the_dense_core():
    """The same bits as GLM-4.7-Flash with these weights; and no indexer runs."""
    shape = sparse_shape(index_topk=256)  # layouts round the longest run up to 256
    dense = shape.model_copy(update=dict(index_n_heads=None, index_head_dim=None, index_topk=None))
    model = random_model(shape)
    plain = random_model(dense)
    plain.load_state_dict(model.state_dict(), strict=False)
    for module in model.modules():
        if isinstance(module, Indexer):
            module.forward = None
    batch, documents, positions = packed(shape)
    arguments = dict(document_ids=documents, positions=positions)
    assert torch.equal(model(batch["input_ids"], **arguments), plain(batch["input_ids"], **arguments))


def changed_scores(change):
    def install(model, monkeypatch):
        monkeypatch.setattr(indexer, "index_scores", change)

    return install


def half_split(model, monkeypatch):
    monkeypatch.setattr(indexer, "rotate_pairs", rotate)


def last_dimensions(model, monkeypatch):
    def rotated(self, x, rope, last_flat_dim):
        kept = x.shape[-1] - self.rotated
        whole = torch.cat([x[..., :kept], indexer.rotate_pairs(x[..., kept:], rope)], dim=-1)
        return whole.flatten(0, last_flat_dim)

    monkeypatch.setattr(Indexer, "_rotated", rotated)


def other_norm(forward):
    def install(model, monkeypatch):
        monkeypatch.setattr(indexer.LayerNorm, "forward", forward)

    return install


def latent_before_its_norm(model, monkeypatch):
    for module in model.modules():
        if isinstance(module, SparseLatentAttention) and module.indexer is not None:
            before = {}
            module.q_a_layernorm.register_forward_hook(lambda _, x, out, before=before: before.update(x=x[0]))
            module.indexer.register_forward_pre_hook(lambda _, x, before=before: (x[0], before["x"], x[2]))


def own_choices(model, monkeypatch):
    for module in model.modules():
        if isinstance(module, SparseLatentAttention) and module.indexer is None:
            module.indexer = model.layers["1"].self_attn.indexer


def larger_epsilon(model, monkeypatch):
    for module in model.modules():
        if isinstance(module, indexer.LayerNorm):
            module.eps = 1e-5


def _scores(q, k, weights, *, relu=True, absolute=False):
    products = torch.einsum("ngj,tj->ngt", q, k) * q.shape[-1] ** -0.5
    weights = weights.abs() if absolute else weights
    return torch.einsum("ngt,ng->nt", products.relu() if relu else products, weights)


FAULTS = {
    "halves are rotated instead of neighbours": half_split,
    "the last dimensions are rotated": last_dimensions,
    "RMSNorm of index keys": other_norm(lambda self, x: F.rms_norm(x, x.shape[-1:], self.weight, self.eps)),
    "epsilon of the model in the norm": larger_epsilon,
    "norm without a bias": other_norm(lambda self, x: F.layer_norm(x, x.shape[-1:], self.weight, None, self.eps)),
    "no ReLU": changed_scores(lambda q, k, weights: _scores(q, k, weights, relu=False)),
    "weights of heads without a sign": changed_scores(lambda q, k, weights: _scores(q, k, weights, absolute=True)),
    "latent of queries before its norm": latent_before_its_norm,
    "sharing layers choose for themselves": own_choices,
}


def small_index_keys(model):
    """Make the index keys so small before their norm that its epsilon changes them."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("indexer.wk.weight"):
                parameter.mul_(1e-3)


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_known_faults_of_other_implementations_are_seen(fault, monkeypatch):
    model = random_model(sparse_shape(index_topk=16, indexer_types=SHARED), seed=1)
    small_index_keys(model)
    ids = random_batch(model.shape, length=LENGTH)["input_ids"]
    with torch.no_grad():
        logits = reference_of(model)(input_ids=ids, use_cache=False).logits
        if fault:
            FAULTS[fault](model, monkeypatch)
        error = relative_error(model(ids), logits)
    assert error < TOLERANCE if fault is None else error > 1e-2


def test_best_keys_of_equal_scores_are_the_first():
    scores = torch.randint(0, 4, (200, 37), generator=torch.Generator().manual_seed(0)).float()
    for count in (1, 5, 36, 37):
        expected = scores.sort(dim=-1, descending=True, stable=True).indices[:, :count].sort(-1).values
        assert torch.equal(best_keys(scores, count), expected)


@pytest.mark.parametrize("size", [1, 700, 2**26])
def test_a_choice_does_not_depend_on_the_chunks(size, monkeypatch):
    """Against a choice by the scores of all pairs, for rows, packed documents and gathered keys."""
    generator = torch.Generator().manual_seed(1)
    rows, length, heads, width, top_k = 2, 23, 4, 8, 6
    q = torch.randn(rows * length, heads, width, generator=generator)
    k = torch.randn(rows * length, width, generator=generator)
    weights = torch.randn(rows * length, heads, generator=generator)
    ids = torch.tensor([[0] * 9 + [1] * 14, [0] * 20 + [1] * 3])
    monkeypatch.setattr(indexer, "_MAX_SCORES", size)
    for layout in (None, attention_layout(ids, (rows, length), None)):
        spans = key_spans(layout, rows, length, q.device)
        documents = torch.zeros_like(ids) if layout is None else ids
        unique = (documents + 10 * torch.arange(rows).unsqueeze(1)).flatten()
        token = torch.arange(rows * length)
        is_visible = (unique.unsqueeze(1) == unique) & (token.unsqueeze(1) >= token)
        scores = index_scores(q, k, weights).masked_fill(~is_visible, float("-inf"))
        expected = [
            set(best_keys(row[None], min(top_k, int(seen.sum())))[0].tolist())
            for row, seen in zip(scores, is_visible, strict=True)
        ]
        for bound in {spans.queries_per_row, 0}:
            chosen = choose_keys(q, k, weights, *spans._replace(queries_per_row=bound), top_k)
            assert [set(row[row >= 0].tolist()) for row in chosen] == expected


@pytest.mark.parametrize("elements", [1, 2**25])
def test_attention_of_chosen_rows_equals_masked_attention_with_its_gradients(elements, monkeypatch):
    monkeypatch.setattr(sparse_attention, "_MAX_GATHERED", elements)
    generator = torch.Generator().manual_seed(2)
    queries, keys, heads, width, value_width, count = 11, 17, 3, 10, 6, 5
    q = torch.randn(queries, heads, width, generator=generator, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(keys, width, generator=generator, dtype=torch.float64, requires_grad=True)
    chosen = torch.stack([torch.randperm(keys, generator=generator)[:count] for _ in range(queries)]).int()
    chosen[0, 1:] = -1
    chosen[3, 4:] = -1
    mask = torch.zeros(queries, keys, dtype=torch.bool)
    for query, row in enumerate(chosen):
        mask[query, row[row >= 0].long()] = True
    scores = torch.einsum("nhw,tw->nht", q, rows) * 0.3
    weights = scores.masked_fill(~mask.unsqueeze(1), float("-inf")).softmax(-1)
    expected = torch.einsum("nht,tl->nhl", weights, rows[:, :value_width])
    out, log_sum = chosen_attention(q, rows, chosen, value_width, 0.3)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(log_sum, scores.masked_fill(~mask.unsqueeze(1), float("-inf")).logsumexp(-1))
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    actual = torch.autograd.grad((out * grad).sum(), (q, rows))
    wanted = torch.autograd.grad((expected * grad).sum(), (q, rows))
    torch.testing.assert_close(actual, wanted)


def take_form(model, form):
    """Let all layers attend to chosen keys with a mask, or to gathered rows, whatever the length of documents."""
    for module in model.modules():
        if isinstance(module, SparseLatentAttention):
            module.longest_masked = {"mask": 10**6, "gather": 0}[form]


def loss_and_gradients(model, form, batch):
    take_form(model, form)
    model.zero_grad()
    sums = model(**batch)
    sums.loss.backward()
    return sums.loss.detach(), gradients(dict(model.named_parameters()))


@pytest.mark.parametrize("kernels", ["of the CPU", "matrix products"])
@pytest.mark.parametrize("case", ["rows", "documents", "shared prefix"])
def test_a_mask_and_gathered_rows_give_the_same_loss_and_gradients(case, kernels, monkeypatch):
    """Rows of two chunks of queries; documents, of which most begin inside a chunk; and keys in another order."""
    if kernels == "matrix products":
        monkeypatch.setattr(masked_attention, "_kernels", lambda _: (plain_attention, plain_attention_backward))
    monkeypatch.setattr(masked_attention, "_MAX_QUERIES", 48)
    model = random_model(sparse_shape(indexer_types=SHARED), seed=1)
    if case == "rows":
        batch = random_batch(model.shape, length=LENGTH)
    else:
        batch, documents, positions = packed(model.shape)
        batch |= dict(document_ids=documents, positions=positions)
    if case == "shared prefix":
        prefixes = torch.where(documents >= 2, 1, -1)
        batch["layout"] = attention_layout(documents, documents.shape, None, prefix_ids=prefixes)
    loss, grads = loss_and_gradients(model, "mask", batch)
    wanted_loss, wanted_grads = loss_and_gradients(model, "gather", batch)
    assert relative_error(loss, wanted_loss) < TOLERANCE
    assert set(grads) == set(wanted_grads)
    errors = {name: relative_error(grads[name], wanted_grads[name]) for name in grads}
    worst = max(errors, key=errors.get)
    assert errors[worst] < TOLERANCE, (worst, errors[worst])


def forms_of(model, **arguments):
    """Names of the forms in which the layers attend."""
    forms = set()
    with pytest.MonkeyPatch.context() as patches:
        for name in ("masked_attention", "chosen_attention"):
            operator = getattr(sparse_attention, name)
            patches.setattr(sparse_attention, name, lambda *x, n=name, o=operator: (forms.add(n), o(*x))[1])
        with torch.no_grad():
            model(**arguments)
    return forms


def test_the_form_depends_on_the_longest_document():
    shape = sparse_shape(num_hidden_layers=2)
    assert (shape.index_topk, shape.latent_width, shape.kv_lora_rank, shape.head_dim) == (8, 48, 32, 40)
    model = random_model(shape)
    forms = {n: forms_of(model, input_ids=torch.arange(2 * n).view(2, n)) for n in (8, 9, 16, 17)}
    # 8 keys x (48 + 32) / 40 = 16 tokens
    assert forms == {8: set(), 9: {"masked_attention"}, 16: {"masked_attention"}, 17: {"chosen_attention"}}


def test_the_form_does_not_depend_on_the_length_of_rows():
    """Layouts round the longest document up to a power of two. All documents of a batch have one form."""
    model = random_model(sparse_shape(num_hidden_layers=2, index_topk=256))
    wanted = {256: set(), 257: {"masked_attention"}, 512: {"masked_attention"}, 513: {"chosen_attention"}}
    for length, form in wanted.items():
        batch, documents, positions = packed(model.shape, lengths=(100, length, 50))
        arguments = dict(document_ids=documents, positions=positions)
        assert forms_of(model, input_ids=batch["input_ids"], **arguments) == form


@pytest.mark.parametrize("rows_in_order", [True, False])
@pytest.mark.parametrize("most_queries", [1, 7, 128])
def test_a_mask_reaches_from_the_start_of_the_longest_document(most_queries, rows_in_order, monkeypatch):
    """Every query chooses all of its document: the first key of the longest one is the furthest from its query."""
    monkeypatch.setattr(masked_attention, "_MAX_QUERIES", most_queries)
    lengths = torch.tensor([5, 31, 12, 22])
    end = lengths.cumsum(0)
    document = torch.arange(4).repeat_interleave(lengths)
    token = torch.arange(70)
    first = (end - lengths)[document]
    keys = first.unsqueeze(1) + torch.arange(31)
    chosen = keys.where(keys <= token.unsqueeze(1), -1).int()
    q, k, v = torch.randn(3, 70, 2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = (document.unsqueeze(1) == document) & (token.unsqueeze(1) >= token)
    expected, log_sum = plain_attention(*(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)), mask.unsqueeze(0))
    out, sums = masked_attention.masked_attention(q, k, v, chosen, [70 if rows_in_order else 0, 31])
    torch.testing.assert_close(out, expected[0].transpose(0, 1))
    torch.testing.assert_close(sums, log_sum[0].t())


def test_published_models_attend_with_a_mask_up_to_about_nine_thousand_tokens():
    assert {longest_masked(PRESETS[name]) for name in ("GLM-5", "GLM-5.1", "GLM-5.2")} == {8704}


def test_operators_work_under_tracing():
    q = torch.randn(6, 2, 8)
    rows = torch.randn(9, 8)
    chosen = torch.randint(0, 9, (6, 4)).int()
    index = torch.randn(6, 2, 4), torch.randn(6, 4), torch.randn(6, 2)
    torch.library.opcheck(choose_keys, (*index, torch.zeros(6).long(), torch.arange(1, 7), 6, 3))
    torch.library.opcheck(chosen_attention, (q.requires_grad_(), rows.requires_grad_(), chosen, 5, 0.5))
    keys, values = torch.randn(2, 9, 2, 8).unbind()
    operands = q, keys.requires_grad_(), values.requires_grad_(), chosen
    torch.library.opcheck(masked_attention.masked_attention, (*operands, [0, 9]))


def test_no_tensor_of_queries_times_keys_exists(monkeypatch):
    """Chunks of scores and of gathered rows stay within their limits, whatever the number of tokens."""
    limit = 2**14
    monkeypatch.setattr(indexer, "_MAX_SCORES", limit)
    monkeypatch.setattr(sparse_attention, "_MAX_GATHERED", limit)
    sizes = []

    def watched_scores(q, k, weights):
        sizes.append(q.shape[0] * q.shape[1] * k.shape[0])
        return index_scores(q, k, weights)

    def watched_weights(q, gathered, chosen, scale):
        sizes.append(gathered.numel())
        return attention_weights(q, gathered, chosen, scale)

    attention_weights = sparse_attention._weights
    monkeypatch.setattr(indexer, "index_scores", watched_scores)
    monkeypatch.setattr(sparse_attention, "_weights", watched_weights)
    shape = sparse_shape(num_hidden_layers=1, first_k_dense_replace=1)
    random_model(shape)(**random_batch(shape, rows=1, length=1000)).loss.backward()
    assert len(sizes) > 100
    assert max(sizes) <= limit


def test_a_mask_covers_a_chunk_of_queries_and_the_longest_document(monkeypatch):
    """In a row of many documents, too, and backward."""
    sizes = []
    mask = masked_attention._mask
    monkeypatch.setattr(masked_attention, "_mask", lambda *x: (sizes.append(mask(*x).shape), mask(*x))[1])
    monkeypatch.setattr(masked_attention, "_MAX_QUERIES", 16)
    shape = sparse_shape(num_hidden_layers=1, first_k_dense_replace=1)
    batch, documents, positions = packed(shape, lengths=(150,) * 10)
    model = random_model(shape)
    take_form(model, "mask")
    model(**batch, document_ids=documents, positions=positions).loss.backward()
    assert len(sizes) == 2 * -(-1500 // 16)
    assert max(queries for _, queries, _ in sizes) == 16
    assert max(keys for *_, keys in sizes) == 256 + 15  # the longest document is rounded up to 256
    sizes.clear()
    monkeypatch.setattr(masked_attention, "_MAX_SCORES", 2**12)
    model(**batch, document_ids=documents, positions=positions).loss.backward()
    assert 0 < max(queries * keys * shape.num_attention_heads for _, queries, keys in sizes) <= 2**12


def test_modules_have_the_released_names():
    shape = sparse_shape(indexer_types=SHARED)
    names = {name for name, _ in random_model(shape).named_parameters() if "indexer" in name}
    parts = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
    assert names == {f"layers.{i}.self_attn.indexer.{part}" for i in (0, 1, 3) for part in parts}
