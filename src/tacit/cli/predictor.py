"""`tacit predictor`: record trainings, train a predictor on the records, and judge it by its use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Make predictors for mp2. E.g. tacit predictor record"
)
RECORD = "record.safetensors"
BATCH = 1_000_000
REPLICAS = 1024
"""At most, as all are in one process."""

Share = Annotated[
    float,
    typer.Option(
        help="What share of the elements a round sends: mp2's budget times the steps from one round to the "
        "next, or a little less; the rest is predicted, e.g. 0.2"
    ),
]


def _say(line: str) -> None:
    typer.echo(line, err=True)


@app.command()
def record(
    data: Annotated[
        str,
        typer.Option(
            "--recipes",
            help="What to train, separated by commas: made-up (images that need no file) and the recipes "
            "of tacit compare, e.g. made-up,digits,cifar10",
        ),
    ] = "made-up,digits",
    models: Annotated[
        str,
        typer.Option(
            help="The networks for made-up, cifar10 and mnist, separated by commas, e.g. lenet,resnet8"
        ),
    ] = "lenet,vgg11-narrow,resnet8",
    path: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="PATH",
            help="Where the images of cifar10 or mnist are, e.g. cifar-10-binary.tar.gz",
            show_default=False,
        ),
    ] = None,
    hold_model: Annotated[
        str, typer.Option(help="The network that nothing is learnt from, or none, e.g. vit")
    ] = "alexnet",
    hold_data: Annotated[
        str, typer.Option(help="Which of --recipes nothing is learnt from, or none, e.g. digits")
    ] = "digits",
    rates: Annotated[
        str, typer.Option(help="Factors on each recipe's learning rate, a run each, e.g. 1,0.3,0.1")
    ] = "1,0.3",
    seeds: Annotated[str, typer.Option(help="A run with each, e.g. 0,1,2")] = "0",
    rounds: Annotated[
        int, typer.Option(help="Rounds to record of each run, in as many stretches as --phases, e.g. 300")
    ] = 120,
    phases: Annotated[
        int,
        typer.Option(help="Stretches, from a run's beginning to its end; other elements in each, e.g. 5"),
    ] = 3,
    length: Annotated[
        int | None,
        typer.Option(
            help="Rounds of each run; by default as many as are recorded, e.g. 2000", show_default=False
        ),
    ] = None,
    every: Annotated[int, typer.Option(help="Steps of the optimizer from one round to the next, e.g. 1")] = 4,
    elements: Annotated[
        int, typer.Option(help="Elements of each layer, at random; all where it has fewer, e.g. 256")
    ] = 128,
    workers: Annotated[int, typer.Option(help="Replicas that average their steps, e.g. 8")] = 4,
    share: Share = 0.4,
    loop: Annotated[
        str | None,
        typer.Option(
            "--predictor",
            metavar="PATH",
            help="Push --share and predict the rest with this file while recording, in place of pushing all: "
            "so that trainings react to predictions, e.g. mp2.pt",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        str, typer.Option(metavar="PATH", help="The file to write, e.g. my-record.safetensors")
    ] = RECORD,
) -> None:
    """Record how single elements of every layer move in ordinary trainings: what predictors learn from.

    Held out are one network and one recipe, by run. E.g. tacit predictor record --rounds 120
    """
    from tacit.cli import predicting, texts

    predicting.record(
        data=predicting.words(data),
        models=predicting.words(models),
        path=texts.path("--data", path),
        hold_model=predicting.or_none(hold_model),
        hold_data=predicting.or_none(hold_data),
        rates=predicting.numbers("--rates", rates, float),
        seeds=[texts.seed("--seeds", each) for each in predicting.numbers("--seeds", seeds, int)],
        sampling={
            "rounds": texts.at_most("--rounds", rounds),
            "phases": texts.at_most("--phases", phases),
            "length": None if length is None else texts.at_most("--length", length),
            "every": texts.at_most("--every", every),
            "elements": texts.at_most("--elements", elements),
            "workers": texts.at_most("--workers", workers, most=REPLICAS),
            "share": share,
        },
        loop=texts.path("--predictor", loop),
        out=texts.path("--out", out) or Path(RECORD),
        tell=_say,
    )


@app.command()
def train(
    records: Annotated[
        list[str] | None,
        typer.Argument(
            help="Files that tacit predictor record wrote; by default record.safetensors, e.g. a.safetensors",
            show_default=False,
        ),
    ] = None,
    network: Annotated[
        str,
        typer.Option(
            help="mp2: convolution, channel attention and max pooling; or wnn, the weight nowcaster, e.g. wnn"
        ),
    ] = "mp2",
    width: Annotated[
        int | None,
        typer.Option(
            help="Channels of mp2's network, 4 by default and 8 at most, e.g. 8", show_default=False
        ),
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(
            help="What share of the elements a round sends, 0.4 by default: so old are the changes that "
            "mp2's network learns from, e.g. 0.11",
            show_default=False,
        ),
    ] = None,
    gains: Annotated[
        str | None,
        typer.Option(
            help="What mp2's predictions are multiplied by, 1 by default; of several, that with which "
            "trainings on made-up images end best, e.g. 0.25,0.5,1",
            show_default=False,
        ),
    ] = None,
    tried_on: Annotated[
        str | None,
        typer.Option(
            help="The networks that gains are tried on, vgg11-narrow by default, e.g. lenet,alexnet",
            show_default=False,
        ),
    ] = None,
    sync_every: Annotated[
        int | None,
        typer.Option(
            help="Steps from one round to the next where gains are tried, 4 by default, e.g. 1",
            show_default=False,
        ),
    ] = None,
    period: Annotated[
        int | None,
        typer.Option(
            help="Recorded rounds between the values that wnn is shown, 4 by default, e.g. 1",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of training a network, e.g. 10000")] = 1000,
    batch: Annotated[int, typer.Option(help="Samples a step, e.g. 4096")] = 1024,
    loss: Annotated[
        str | None,
        typer.Option(help="Of mp2's network: l1 (the default) or mse, e.g. mse", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides the initial weights and the samples, e.g. 1")] = 0,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="The file to write; by default mp2.pt or wnn.pt, e.g. mine.pt",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train a predictor on records, a network for each kind of layer; what is held out is left alone.

    The file is used by mp2:weights=FILE. E.g. tacit predictor train record.safetensors --width 4
    """
    from tacit.cli import predicting, texts

    predicting.train(
        records=texts.paths("RECORDS", records or [RECORD]),
        network=network,
        of_mp2={"width": width, "share": share, "loss": loss},
        of_gains={"gains": gains, "tried-on": tried_on, "sync-every": sync_every},
        of_wnn={"period": period},
        common={
            "steps": texts.at_most("--steps", steps),
            "batch": texts.at_most("--batch", batch, most=BATCH),
            "seed": texts.seed("--seed", seed),
        },
        out=texts.path("--out", out) or Path(f"{network}.pt"),
        tell=_say,
    )


@app.command()
def evaluate(
    predictor: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="A file that tacit predictor train wrote, to judge, too, e.g. mp2.pt",
            show_default=False,
        ),
    ] = None,
    records: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="A record, for the errors on what is held out in it, e.g. record.safetensors",
            show_default=False,
        ),
    ] = None,
    candidates: Annotated[
        str,
        typer.Option(
            help="What else to judge, separated by commas: mp2 and wnn as they come with tacit, linear, "
            "exponential, stale (no change), e.g. mp2,stale"
        ),
    ] = "mp2,wnn,linear,exponential,stale",
    recipe: Annotated[
        str,
        typer.Option(
            help="What to train by the predictions: made-up, or a recipe of tacit compare, e.g. made-up"
        ),
    ] = "digits",
    model: Annotated[
        str | None,
        typer.Option(help="The network for made-up, cifar10 or mnist, e.g. alexnet", show_default=False),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Where the images of cifar10 or mnist are, e.g. my-images/",
            show_default=False,
        ),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Epochs; by default the recipe's own, e.g. 2", show_default=False)
    ] = None,
    workers: Annotated[int, typer.Option(help="Replicas, all in this process, e.g. 8")] = 4,
    share: Share = 0.44,
    sync_every: Annotated[int, typer.Option(help="Steps from one round to the next, e.g. 1")] = 4,
    within: Annotated[
        float, typer.Option(help="By what share the loss may be above that of the full push, e.g. 0.05")
    ] = 0.02,
    moments: Annotated[
        int, typer.Option(help="At how many moments models are put together of predictions, e.g. 10")
    ] = 5,
    seed: Annotated[
        int, typer.Option(help="Decides the initial weights and the order of the data, e.g. 1")
    ] = 0,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="A page with the table and elements' paths, e.g. predictors.html",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print one JSON object on stdout, e.g. tacit predictor evaluate --json | jq .rows"
        ),
    ] = False,
) -> None:
    """Judge predictors: one step ahead, in models put together of their predictions, and in a whole training.

    A training whose loss ends within 2 % of the full push's passes. E.g. tacit predictor evaluate --epochs 2
    """
    from tacit.cli import predicting, texts

    predicting.evaluate(
        predictor=texts.path("--predictor", predictor),
        records=texts.path("--records", records),
        candidates=predicting.words(candidates),
        recipe=recipe,
        model=model,
        data=texts.path("--data", data),
        epochs=None if epochs is None else texts.at_most("--epochs", epochs),
        how={
            "workers": texts.at_most("--workers", workers, most=REPLICAS),
            "share": share,
            "sync_every": texts.at_most("--sync-every", sync_every),
            "seed": texts.seed("--seed", seed),
        },
        within=within,
        moments=texts.at_most("--moments", moments),
        out=texts.path("--out", out),
        as_json=as_json,
        tell=_say,
    )
