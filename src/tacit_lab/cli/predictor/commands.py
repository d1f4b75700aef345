"""The commands `tacit predictor record`, `train` and `evaluate`."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Train and evaluate predictors for mp2. E.g. tacit predictor record",
)
RECORD = "record.safetensors"
"""The default name of the file that `record` writes and `train` reads."""

Share = Annotated[
    float,
    typer.Option(
        help="Share of the elements that a round sends: mp2's budget times the steps from one round to the "
        "next, or a little less; the rest is predicted, e.g. 0.2"
    ),
]


def _print_note(line: str) -> None:
    typer.echo(line, err=True)


def _is_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


@app.command()
def record(
    context: typer.Context,
    script: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- SCRIPT ARGS",
            help="After --: a training script of yours to record instead, with its arguments, or torchrun "
            "with its options before it, e.g. -- train.py --epochs 3",
            show_default=False,
        ),
    ] = None,
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
            help="Folder or archive with the images of cifar10 or mnist, e.g. cifar-10-binary.tar.gz",
            show_default=False,
        ),
    ] = None,
    hold_model: Annotated[
        str, typer.Option(help="The network that is held out from training a predictor, or none, e.g. vit")
    ] = "alexnet",
    hold_data: Annotated[
        str,
        typer.Option(help="The recipe that is held out from training a predictor, or none, e.g. digits"),
    ] = "digits",
    rates: Annotated[
        str, typer.Option(help="Factors on each recipe's learning rate, with a run for each, e.g. 1,0.3,0.1")
    ] = "1,0.3",
    seeds: Annotated[str, typer.Option(help="Seeds, with a run for each, e.g. 0,1,2")] = "0",
    rounds: Annotated[
        int, typer.Option(help="Rounds to record of each run, in as many parts as --phases, e.g. 300")
    ] = 120,
    phases: Annotated[
        int,
        typer.Option(help="Parts of a run that are recorded, evenly spaced, each of other elements, e.g. 5"),
    ] = 3,
    length: Annotated[
        int | None,
        typer.Option(
            help="Rounds of each run; by default as many as are recorded, e.g. 2000", show_default=False
        ),
    ] = None,
    every: Annotated[int, typer.Option(help="Steps of the optimizer from one round to the next, e.g. 1")] = 4,
    elements: Annotated[
        int,
        typer.Option(
            help="Elements to record of each layer, chosen at random; all if it has fewer, e.g. 256"
        ),
    ] = 128,
    workers: Annotated[int, typer.Option(help="Number of replicas that average their updates, e.g. 8")] = 4,
    share: Share = 0.4,
    loop: Annotated[
        str | None,
        typer.Option(
            "--predictor",
            metavar="PATH",
            help="While recording, send only --share and predict the rest with this file, so that trainings "
            "react to predictions, e.g. mp2.pt",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        str, typer.Option(metavar="PATH", help="The file to write, e.g. my-record.safetensors")
    ] = RECORD,
) -> None:
    """Record how single elements of every layer change in ordinary trainings, for predictors to learn from.

    The runs of one network and of one recipe are held out. E.g. tacit predictor record --rounds 120.
    After -- it runs a script of yours, and records the first optimizer that steps in it: on rank 0, after
    every --every steps. The exit code is then the script's.
    """
    from tacit_lab.cli.predictor import options, runner

    sizes = {"rounds": rounds, "phases": phases, "length": length, "every": every}
    sampling = {**sizes, "elements": elements, "share": share}
    if script:
        given = [name for name in context.params if _is_typed(context, name)]
        of_script = options.check_script(script, given, seeds=seeds, sampling=sampling, out=out)
        raise typer.Exit(runner.record_script(of_script, _print_note))
    runs = options.planned(
        recipes=data, models=models, hold_model=hold_model, hold_data=hold_data, rates=rates, seeds=seeds
    )
    sampling["workers"] = workers
    checked = options.check_record(runs, data=path, sampling=sampling, predictor=loop, out=out)
    runner.record(checked, _print_note)


@app.command()
def train(
    records: Annotated[
        list[str] | None,
        typer.Argument(
            help="Files of tacit predictor record; by default record.safetensors, e.g. a.safetensors",
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
            help="Share of the elements that a round sends, 0.4 by default. It decides how old the changes "
            "are that mp2's network learns from, e.g. 0.11",
            show_default=False,
        ),
    ] = None,
    gains: Annotated[
        str | None,
        typer.Option(
            help="Factor on mp2's predictions, 1 by default; of several, the one with which trainings on "
            "made-up images end best, e.g. 0.25,0.5,1",
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
            help="Recorded rounds between the values that wnn's network takes, 4 by default, e.g. 1",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps of each network, e.g. 10000")] = 1000,
    batch: Annotated[int, typer.Option(help="Samples in a batch, e.g. 4096")] = 1024,
    loss: Annotated[
        str | None,
        typer.Option(help="Loss of mp2's network: l1 (the default) or mse, e.g. mse", show_default=False),
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
    """Train a predictor on records: a network for each kind of layer. Held-out runs are not used.

    The file is for mp2:weights=FILE. E.g. tacit predictor train record.safetensors --width 4
    """
    from tacit_lab.cli.predictor import options, runner

    checked = options.check_train(
        records=records or [RECORD],
        network=network,
        mp2={"width": width, "share": share, "loss": loss},
        gains={"gains": gains, "tried-on": tried_on, "sync-every": sync_every},
        wnn={"period": period},
        steps=steps,
        batch=batch,
        seed=seed,
        out=out,
    )
    runner.train(checked, _print_note)


@app.command()
def evaluate(
    predictor: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="A file of tacit predictor train to evaluate, too, e.g. mp2.pt",
            show_default=False,
        ),
    ] = None,
    records: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="A file of tacit predictor record, for errors on its held-out runs, e.g. record.safetensors",
            show_default=False,
        ),
    ] = None,
    candidates: Annotated[
        str,
        typer.Option(
            help="What else to evaluate, separated by commas: mp2 and wnn as they come with tacit, linear, "
            "exponential, stale (no change), e.g. mp2,stale"
        ),
    ] = "mp2,wnn,linear,exponential,stale",
    recipe: Annotated[
        str,
        typer.Option(
            help="What to train with the predictions: made-up, or a recipe of tacit compare, e.g. made-up"
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
            help="Folder or archive with the images of cifar10 or mnist, e.g. my-images/",
            show_default=False,
        ),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Epochs; by default the recipe's, e.g. 2", show_default=False)
    ] = None,
    workers: Annotated[int, typer.Option(help="Number of replicas, all in this process, e.g. 8")] = 4,
    share: Share = 0.44,
    sync_every: Annotated[int, typer.Option(help="Steps from one round to the next, e.g. 1")] = 4,
    within: Annotated[
        float,
        typer.Option(help="By what share the loss may be above that of a full push, e.g. 0.05"),
    ] = 0.02,
    moments: Annotated[
        int, typer.Option(help="At how many steps models are made of predicted parameters, e.g. 10")
    ] = 5,
    seed: Annotated[
        int, typer.Option(help="Decides the initial weights and the order of the data, e.g. 1")
    ] = 0,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="File for a page with the table and the paths of elements, e.g. predictors.html",
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
    """Evaluate predictors: one step ahead, in models made of predicted parameters, and in a whole training.

    It passes if its loss ends within 2 % of that of a full push. E.g. tacit predictor evaluate --epochs 2
    """
    from tacit_lab.cli.predictor import options, runner

    trial = options.trial(
        recipe=recipe,
        model=model,
        data=data,
        epochs=epochs,
        workers=workers,
        share=share,
        sync_every=sync_every,
        seed=seed,
    )
    checked = options.check_evaluate(
        trial,
        predictor=predictor,
        records=records,
        candidates=candidates,
        within=within,
        moments=moments,
        out=out,
    )
    runner.evaluate(checked, as_json=as_json, tell=_print_note)
