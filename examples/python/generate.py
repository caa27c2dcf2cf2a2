"""Continuous batching: a small transformer that generates on the host device, beside a training session.

Requests join and leave the batch between steps. Each step is an iteration of the model's session, so steps and the training job take
turns. A request's keys and values are its memory: they grow with each token, and are computed again if the queue takes them back.
"""
# SPDX-License-Identifier: Apache-2.0
import threading

import numpy as np

import gpushare

VOCABULARY, WIDTH, HEADS, LAYERS = 96, 64, 4, 2
END = 0  # the token that ends an answer


class Transformer:
    """Decoder of LAYERS layers with random weights. Its cache is the keys and values of the tokens so far, by layer."""

    def __init__(self, seed=1):
        random = np.random.default_rng(seed)
        matrix = lambda *shape: random.normal(0, 0.3, shape)
        self.embedding = matrix(VOCABULARY, WIDTH)
        self.layers = [{name: matrix(WIDTH, WIDTH) for name in ("query", "key", "value", "out")} |
                       {"up": matrix(WIDTH, 4 * WIDTH), "down": matrix(4 * WIDTH, WIDTH)} for _ in range(LAYERS)]

    @staticmethod
    def _norm(x):
        return (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-5)

    @staticmethod
    def _position(first, count):
        angle = (first + np.arange(count))[:, None] / 1000 ** (np.arange(WIDTH // 2) / (WIDTH // 2))
        return np.concatenate([np.sin(angle), np.cos(angle)], -1)

    def forward(self, tokens, cache):
        """Appends the tokens to the cache and returns the scores of the next token."""
        first = len(cache[0][0])
        x = self.embedding[tokens] + self._position(first, len(tokens))
        for weights, (keys, values) in zip(self.layers, cache):
            y = self._norm(x)
            query = (y @ weights["query"]).reshape(-1, HEADS, WIDTH // HEADS)
            keys.extend((y @ weights["key"]).reshape(-1, HEADS, WIDTH // HEADS))
            values.extend((y @ weights["value"]).reshape(-1, HEADS, WIDTH // HEADS))
            scores = np.einsum("qhd,khd->hqk", query, np.asarray(keys)) / np.sqrt(WIDTH // HEADS)
            later = np.arange(len(keys)) > first + np.arange(len(tokens))[:, None]
            scores = np.where(later, -1e9, scores)
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            attended = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), np.asarray(values))
            x = x + attended.reshape(-1, WIDTH) @ weights["out"]
            x = x + np.maximum(self._norm(x) @ weights["up"], 0) @ weights["down"]
        return self._norm(x[-1]) @ self.embedding.T

    @staticmethod
    def new_cache():
        return [([], []) for _ in range(LAYERS)]

    def generate_alone(self, prompt, most):
        """The same without a queue, one request at a time."""
        cache, out, tokens = self.new_cache(), [], list(prompt)
        while len(out) < most and (not out or out[-1] != END):
            out.append(int(np.argmax(self.forward(tokens, cache))))
            tokens = out[-1:]
        return out


BYTES_PER_TOKEN = LAYERS * 2 * WIDTH * 8


def serve(model):
    """The step function: `payload` is (prompt, most tokens), `state` the cache."""

    def step(iteration, step):
        for member in step.members:
            prompt, most = member.payload
            if member.before == 0 and member.prefill:
                member.state = Transformer.new_cache()
            if member.prefill:
                tokens = (list(prompt) + member.values)[member.before:member.before + member.prefill]
            else:
                tokens = member.values[-1:]
            scores = model.forward(tokens, member.state)
            if member.generates:
                token = int(np.argmax(scores))
                member.emit(token, done=token == END or len(member.values) + 1 == most)

    return step


def train(session, stop, losses):
    """Logistic regression by gradient descent, an iteration a step."""
    random = np.random.default_rng(2)
    inputs = random.normal(size=(256, 32))
    labels = (inputs @ random.normal(size=32) > 0)
    weights = session.array((32,))
    weights[:] = 0
    for iteration in session.iterations():
        guess = 1 / (1 + np.exp(-inputs @ weights))
        losses.append(float(-np.mean(np.log(np.where(labels == 1, guess, 1 - guess) + 1e-9))))
        weights[:] -= 0.5 * inputs.T @ (guess - labels) / len(labels)
        if stop.is_set():
            break


def main(requests=24):
    model = Transformer()
    random = np.random.default_rng(3)
    with gpushare.Runtime("host", policy="fair") as runtime:
        trainer = runtime.open_session("training")
        server = runtime.open_session("generation")
        stop, losses = threading.Event(), []
        training = threading.Thread(target=train, args=(trainer, stop, losses))
        training.start()
        with gpushare.StepQueue(server, serve(model), memory=200 * BYTES_PER_TOKEN) as queue:
            streams = []
            for _ in range(requests):
                prompt = [int(token) for token in random.integers(1, VOCABULARY, random.integers(4, 40))]
                streams.append(queue.submit((prompt, 20), prompt_tokens=len(prompt), first_deadline=60, token_time=10,
                                            start_bytes=len(prompt) * BYTES_PER_TOKEN, step_bytes=BYTES_PER_TOKEN))
            print("first answer:", *streams[0])  # as its tokens come
            answers = [stream.result() for stream in streams]
            info = queue.info()
        stop.set()
        training.join()
    for stream, answer in zip(streams, answers):
        assert answer == model.generate_alone(*stream._payload)
    print(f"{requests} answers of {info['tokens']} tokens in {info['steps']} steps, {info['in_time']} in time; "
          f"{len(losses)} training iterations meanwhile, loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
