"""How well a policy does in an environment: seeded rollouts, success rates with intervals, resumable."""

from soma_lightning.evaluation.folder import CONTACT_SHEET, EPISODES, REPORT, RESULTS, SETTINGS, SUCCESS_CHART, VIDEOS
from soma_lightning.evaluation.folder import check_folder as check_folder
from soma_lightning.evaluation.protocol import LiberoProtocol as LiberoProtocol
from soma_lightning.evaluation.results import summarize as summarize
from soma_lightning.evaluation.results import wilson_interval as wilson_interval
from soma_lightning.evaluation.run import evaluate as evaluate
from soma_lightning.evaluation.run import evaluate_seeds as evaluate_seeds
from soma_lightning.evaluation.runner import draw_noise as draw_noise
from soma_lightning.evaluation.settings import EvaluationSettings as EvaluationSettings
from soma_lightning.evaluation.settings import Rollout as Rollout

__all__ = ["CONTACT_SHEET", "EPISODES", "REPORT", "RESULTS", "SETTINGS", "SUCCESS_CHART", "VIDEOS"]
