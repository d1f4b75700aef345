from pathlib import Path

import pytest
import torch
from torch import nn

from tacit.algorithms import parse
from tacit.errors import ConfigError
from tacit_lab import recipes
from tacit_lab.recipes import Choices, lora
from tacit_lab.recipes import digits as digits_module
from tacit_lab.recipes import recommender as recommender_module
from tacit_lab.recipes.bytes import Bytes
from tacit_lab.recipes.recipe import Recipe, optimizer_of, shard

SMALL = pytest.mark.parametrize(
    "recipe", [recipes.get(name) for name in ("bytes", "digits", "lora", "recommender")], ids=lambda r: r.name
)


@pytest.fixture(autouse=True)
def a_base_that_is_soon_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "BASE_EPOCHS", 1)
    monkeypatch.setattr(Bytes, "steps", 20)


@pytest.fixture(params=recipes.known())
def recipe(request: pytest.FixtureRequest) -> Recipe:
    """Every recipe; those of images with small ones, in files."""
    data = {"cifar10": "pictures", "mnist": "digits"}.get(request.param)
    if data is None:
        return recipes.get(request.param)
    return recipes.get(request.param, Choices(data=request.getfixturevalue(data)))


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def first_batches(recipe: Recipe, **where: int) -> torch.Tensor:
    batches = recipe.train_batches(**{"epoch": 0, "rank": 0, "world": 2, "seed": 0, **where})
    return torch.cat([next(batches)[0], next(batches)[0]])


def train(recipe: Recipe, model: nn.Module, *, epochs: int, steps: int, world: int = 4) -> None:
    """What DDP computes, in one process: every step's gradient is the mean over the ranks' batches."""
    optimizer = recipe.optimizer(model)
    for epoch in range(epochs):
        ranks = [recipe.train_batches(epoch, rank, world, 0) for rank in range(world)]
        for _, batches in zip(range(steps), zip(*ranks, strict=True), strict=False):
            optimizer.zero_grad()
            for inputs, targets in batches:
                (recipe.loss(model(inputs), targets) / world).backward()
            optimizer.step()


def test_the_seed_alone_decides_the_initial_weights(recipe: Recipe) -> None:
    torch.manual_seed(7)
    first, drawn = weights(recipe.model(1)), torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(1)), "torch's own generator must stay as it was"
    assert torch.equal(first, weights(recipe.model(1)))
    assert not torch.equal(first, weights(recipe.model(2)))


def test_seed_epoch_and_rank_decide_the_order_of_the_data(recipe: Recipe) -> None:
    torch.manual_seed(1)
    first = first_batches(recipe)
    torch.manual_seed(2)
    assert torch.equal(first, first_batches(recipe))
    for other in ({"epoch": 1}, {"rank": 1}, {"seed": 1}):
        assert not torch.equal(first, first_batches(recipe, **other)), other


def test_an_epoch_has_as_many_batches_as_it_says_of_the_size_it_says(recipe: Recipe) -> None:
    batches = list(recipe.train_batches(0, 1, 4, 0))
    assert len(batches) == recipe.steps_per_epoch(4) > 10
    assert {len(inputs) for inputs, _ in batches} == {recipe.batch}
    assert recipe.steps_per_epoch(100_000) == 0


def test_ranks_get_disjoint_shards_of_one_shuffled_epoch() -> None:
    shards = [shard(103, 5, steps=5, epoch=2, rank=rank, world=4, seed=1) for rank in range(4)]
    assert {tuple(each.shape) for each in shards} == {(5, 5)}
    indices = torch.cat([each.flatten() for each in shards]).tolist()
    assert len(set(indices)) == 100
    assert indices != sorted(indices)
    assert set(indices) <= set(range(103))


@SMALL
def test_no_rank_trains_on_what_is_held_out(recipe: Recipe) -> None:
    module = __import__(type(recipe).__module__, fromlist=["_data"])
    data = module._data()
    if recipe.name == "recommender":
        train, held_out = data.train.items, data.held_out.items
    else:
        train, held_out = data[0], data.test_images if recipe.name == "digits" else data.held_out
    seen = {row.numpy().tobytes() for row in train}
    assert not [row for row in held_out if row.numpy().tobytes() in seen]


@pytest.mark.parametrize("name", ["gpt", "lora", "recommender"])
def test_rates_are_chosen_by_data_of_neither_training_nor_the_test(name: str) -> None:
    recipe = recipes.get(name)
    if isinstance(recipe, Bytes):
        parts, model = [*recipe.data()], nn.Embedding(256, 256)
    else:
        whole = recommender_module._data()
        chosen_by = recommender_module._drawn(1, recipe.validation)
        parts, model = [each.items for each in (*whole, chosen_by)], recipe.model(0)
    train, held_out, chosen = ({row.numpy().tobytes() for row in part} for part in parts)
    assert not chosen & (train | held_out)
    assert recipe.validation >= 4096
    assert 0 <= (recipe.validate(model) or 0.0) < 0.3


def test_lora_tells_how_far_its_base_is_and_trains_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path))
    told: list[str] = []
    recipes.get("lora").prepare(told.append)
    recipes.get("lora").prepare(told.append)
    assert told == ["lora: its base is trained first, and kept: step 0 of 20"]


def test_digits_are_those_of_scikit_learn() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    table = digits_module._table(digits_module.file())
    assert (table[:, :-1] == datasets.load_digits().data).all()
    assert (table[:, -1] == datasets.load_digits().target).all()


def test_digits_learns() -> None:
    recipe = recipes.get("digits")
    model = recipe.model(0)
    assert sum(parameter.numel() for parameter in model.parameters()) == 983_114
    assert recipe.evaluate(model)[1] < 0.3
    train(recipe, model, epochs=3, steps=22)
    assert recipe.evaluate(model)[1] > 0.9


def test_bytes_learns() -> None:
    recipe = recipes.get("bytes")
    model = recipe.model(0)
    before = recipe.evaluate(model)
    train(recipe, model, epochs=1, steps=12, world=1)
    after = recipe.evaluate(model)
    assert after[0] < before[0] - 1.0
    assert after[1] > before[1] + 0.05


def test_recommender_learns() -> None:
    recipe = recipes.get("recommender")
    model = recipe.model(0)
    assert model.items.weight.shape == (50_000, 64)
    assert recipe.evaluate(model)[1] < 0.2
    train(recipe, model, epochs=1, steps=30)
    assert recipe.evaluate(model)[1] > 0.35


def test_the_gradient_of_a_recommender_is_dense_with_rows_of_zeros() -> None:
    recipe = recipes.get("recommender")
    model = recipe.model(0)
    items, targets = next(recipe.train_batches(0, 0, 4, 0))
    recipe.loss(model(items), targets).backward()  # type: ignore[no-untyped-call]
    gradient = model.items.weight.grad
    assert gradient is not None
    assert not gradient.is_sparse
    assert gradient.abs().sum(1).nonzero().flatten().tolist() == items.unique().tolist()


def test_items_of_a_recommender_come_by_genre_and_popularity() -> None:
    data = recommender_module._data().train
    next_items = data.items[:, recommender_module.SEEN :].gather(1, data.targets[:, None])
    seen = data.items[:, : recommender_module.SEEN] % recommender_module.GENRES
    loyal = (seen == next_items % recommender_module.GENRES).any(1).float().mean()
    assert 0.8 < loyal < 0.9, "four of five next items, and a few by chance, are of a genre seen before"
    popular = (data.items < recommender_module.GENRES).float().mean()
    assert 0.1 < popular < 0.2, "the first of 500 items has the share 1 / (1 + 1/2 + ... + 1/500)"
    assert 0 <= int(data.items.min()) < int(data.items.max()) < recommender_module.ITEMS


def test_gpt_trains_on_what_bytes_does_with_eleven_million_parameters() -> None:
    gpt, small = recipes.get("gpt"), recipes.get("bytes")
    model = gpt.model(0)
    assert sum(parameter.numel() for parameter in model.parameters()) == 10_795_008
    assert isinstance(gpt, Bytes)
    assert isinstance(small, Bytes)
    for part in ("train", "held_out"):
        assert torch.equal(getattr(gpt.data(), part), getattr(small.data(), part))
    inputs, targets = next(gpt.train_batches(0, 0, 4, 0))
    optimizer = gpt.optimizer(model)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = gpt.loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[2] < losses[0] - 0.5
    assert gpt.rate(0.1) < gpt.rate(0.2) > gpt.rate(0.9)


def test_lora_learns_by_its_adapters_alone() -> None:
    recipe = recipes.get("lora")
    model = recipe.model(0)
    learnt = {name: each for name, each in model.named_parameters() if each.requires_grad}
    assert sum(each.numel() for each in learnt.values()) == 49_152
    assert {name.rpartition(".")[2] for name in learnt} == {"down", "up"}
    assert {id(each) for group in recipe.optimizer(model).param_groups for each in group["params"]} == {
        id(each) for each in learnt.values()
    }
    frozen = {name: each.clone() for name, each in model.named_parameters() if name not in learnt}
    before = recipe.evaluate(model)
    train(recipe, model, epochs=1, steps=8, world=2)
    assert recipe.evaluate(model)[0] < before[0] - 0.05
    now = dict(model.named_parameters())
    assert all(torch.equal(each, now[name]) for name, each in frozen.items())


def test_untrained_adapters_change_nothing() -> None:
    recipe = recipes.get("lora")
    text = torch.randint(256, (2, 128), generator=torch.Generator().manual_seed(0))
    assert torch.equal(recipe.model(0)(text), lora._base()(text))


def test_the_base_is_trained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path))
    first = weights(lora._base())
    monkeypatch.delattr(lora, "_trained")
    assert torch.equal(first, weights(lora._base()))


def test_a_byte_sees_only_what_came_before_it() -> None:
    model = recipes.get("bytes").model(0)
    text = torch.randint(256, (1, 128), generator=torch.Generator().manual_seed(0))
    changed = text.clone()
    changed[0, 64] = (changed[0, 64] + 1) % 256
    difference = (model(text) - model(changed)).abs().amax(2)[0]
    assert difference[:64].max() == 0
    assert difference[64:].min() > 0


def test_an_unknown_recipe_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown recipe 'digit'\. Did you mean 'digits'"):
        recipes.get("digit")


@pytest.mark.parametrize("name", ["digits", "bytes"])
def test_who_keeps_momentum_itself_is_stepped_by_sgd_without(name: str) -> None:
    recipe = recipes.get(name)
    own = recipe.optimizer(recipe.model(0)).param_groups[0]
    for strategy in (None, parse("topk")):
        (group,) = optimizer_of(recipe, recipe.model(0), strategy, 0.5).param_groups
        assert group == {**own, "params": group["params"], "lr": 0.5 * own["lr"]}
    for named in ("demo:k=8", "dion"):
        found = optimizer_of(recipe, recipe.model(0), parse(named), 0.5)
        assert type(found) is torch.optim.SGD
        (group,) = found.param_groups
        kept = (group["lr"], group["momentum"], group["weight_decay"])
        assert kept == (0.5 * own["lr"], 0, own["weight_decay"])
