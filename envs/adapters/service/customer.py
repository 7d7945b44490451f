"""The rule-based customer: looks for words in the agent's message, and answers from the case."""

from __future__ import annotations

import re
from collections.abc import Sequence

from verl_turnkey.envs.adapters.service.cases import Case, Request
from verl_turnkey.envs.users import Line

WORDS = {
    "email": r"e-?mail",
    "order": r"which (item|order)|what order|order number",
    "cancel": r"why|reason",
    "address": r"address",
    "payment": r"payment|pay\b|card",
    "exchange": r"colou?r|which one|instead",
    "confirm": r"confirm|shall i|should i|may i (?!ask|have|know|see)|proceed|go ahead|is that right|do you agree",
}
"""expressions for what a message asks for; the names of kinds ask for the detail of such a request"""
DEEDS = {
    "cancel": r"cancel",
    "address": r"address",
    "payment": r"payment|pay\b",
    "return": r"return",
    "exchange": r"exchange",
    "refund": r"refund",
}
"""expressions for the change that a message announces"""
ORDER = re.compile(r"\bO\d{3}\b", re.IGNORECASE)
EMAIL = re.compile(r"e-?mail address", re.IGNORECASE)
"""which asks for no postal address"""
YES, NO = "Yes, please.", "No, that is not what I want."
PARDON, WHICH = "I do not understand.", "Which order, and which change?"


def announced(message: str) -> set[tuple[str, str]]:
    """Order and change of each pair that a message may ask the customer to confirm."""
    text = EMAIL.sub("email", message.lower())
    orders = {order.upper() for order in ORDER.findall(message)}
    return {(order, kind) for order in orders for kind, deed in DEEDS.items() if re.search(deed, text)}


class RulesCustomer:
    """Answers the last line of a dialogue, whatever was said before; never at random."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def reply(self, scenario: str, dialogue: Sequence[Line]) -> str:
        """As :meth:`verl_turnkey.envs.users.User.reply`; the scenario is the case's."""
        message = dialogue[-1].text
        text = EMAIL.sub("email", message.lower())
        topics = {topic for topic, words in WORDS.items() if re.search(words, text)}
        answers = []
        if "confirm" in topics and (pairs := announced(message)):
            wanted = {(request.order, request.kind) for request in self._case.requests}
            answers.append(YES if pairs & wanted else NO)
            topics &= {"email", "cancel"}  # what else is named belongs to the change
        if "email" in topics:
            answers.append(f"My email address is {self._case.customer['email']}.")
        answers += [words for request in self._case.requests if (words := self._of(request, topics))]
        if not answers:
            answers = [WHICH] if "confirm" in topics else [PARDON, *(request.wish for request in self._case.requests)]
        return " ".join(answers)

    def _of(self, request: Request, topics: set[str]) -> str:
        if request.kind in topics and request.answer:
            others = len(self._case.requests) > 1
            return f"For the {request.label}: {request.answer}" if others else request.answer
        if "order" in topics:
            return f"It is order {request.order}." if self._case.details else f"It is the one with the {request.label}."
        return ""
