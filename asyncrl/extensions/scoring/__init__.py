"""Models that score rollouts: teachers, judges and reward models."""

from asyncrl.base.extensions import Extension, RewardKind

EXTENSION = Extension(
    about="Scores by teachers, judges and reward models.",
    page="docs/rewards.md",
    extra="judge",
    fields={
        "": "asyncrl.extensions.scoring.settings:OF_RUN",
        "placement": "asyncrl.extensions.scoring.settings:OF_PLACEMENT",
    },
    check="asyncrl.extensions.scoring.scoring_check:check_models",
    roles="asyncrl.extensions.scoring.scoring_roles:roles",
    columns="asyncrl.extensions.scoring.scoring_rules:columns",
    engine_role="asyncrl.extensions.scoring.scoring_roles:engine_role",
    annotations="asyncrl.extensions.scoring.scoring_roles:teachings",
    rewards={
        "judge": RewardKind(
            "asyncrl.extensions.scoring.judge_config:JudgedReward",
            "asyncrl.extensions.scoring.served_judge:ask_judge",
        ),
        "model": RewardKind(
            "asyncrl.extensions.scoring.reward_model_config:ModelledReward",
            "asyncrl.extensions.scoring.reward_client:ask_model",
        ),
    },
    refusals={"": "asyncrl.extensions.scoring.scoring_rules:refusals"},
    metrics="asyncrl.extensions.scoring:scoring_metrics.csv",
    cures={
        "teaching": "asyncrl.extensions.scoring.scoring_cures:teacher_cures",
        "The judge": "asyncrl.extensions.scoring.scoring_cures:judge_cures",
        "The reward model": "asyncrl.extensions.scoring.scoring_cures:model_cures",
    },
)
