"""Line charts as SVG, for pages of docs/results: no plotting library, readable on light and on dark pages."""

import math
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 760, 380, 70, 46, 52
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#17becf", "#8c564b", "#7f7f7f")


def ticks(low, high, about=6):
    """Round numbers inside a range."""
    span = (high - low) or abs(high) or 1.0
    unit = 10 ** math.floor(math.log10(span / about))
    step = next(unit * k for k in (1, 2, 5, 10) if span / (unit * k) <= about)
    first = math.ceil(low / step - 1e-9)
    return [round(step * (first + i), 10) for i in range(int(math.floor(high / step + 1e-9)) - first + 1)]


def smoothed(values, width):
    """Means over the last `width` values, from the first full one on."""
    return [sum(values[i - width + 1:i + 1]) / width for i in range(width - 1, len(values))]


def number(value):
    return f"{value:.10g}"


def chart(title, x_title, y_title, lines):
    """`lines`: (name, [(x, y), ...]) each; the names stand at the right of the picture."""
    lines = [(name, points) for name, points in lines if points]
    xs = [x for _, points in lines for x, _ in points]
    ys = [y for _, points in lines for _, y in points]
    low, high = min(ys), max(ys)
    margin = 0.05 * ((high - low) or 1.0)
    low, high = low - margin, high + margin
    right, bottom = WIDTH - 170, HEIGHT - BOTTOM

    def at(x, y):
        left = min(xs)
        return (LEFT + (right - LEFT) * (x - left) / ((max(xs) - left) or 1.0), bottom - (bottom - TOP) * (y - low) / (high - low))

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
             f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
             f'<text x="{LEFT}" y="24" font-size="15" font-weight="bold">{escape(title)}</text>']
    for y in ticks(low, high):
        _, py = at(min(xs), y)
        parts.append(f'<line x1="{LEFT}" y1="{py:.1f}" x2="{right}" y2="{py:.1f}" stroke="#dddddd"/>'
                     f'<text x="{LEFT - 6}" y="{py + 4:.1f}" text-anchor="end">{number(y)}</text>')
    for x in ticks(min(xs), max(xs)):
        px, _ = at(x, low)
        parts.append(f'<line x1="{px:.1f}" y1="{bottom}" x2="{px:.1f}" y2="{bottom + 4}" stroke="#333333"/>'
                     f'<text x="{px:.1f}" y="{bottom + 18}" text-anchor="middle">{number(x)}</text>')
    parts.append(f'<line x1="{LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}" stroke="#333333"/>'
                 f'<text x="{(LEFT + right) / 2:.0f}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x_title)}</text>'
                 f'<text transform="translate(16 {(TOP + bottom) / 2:.0f}) rotate(-90)" text-anchor="middle">{escape(y_title)}</text>')
    for i, (name, points) in enumerate(lines):
        colour = COLOURS[i % len(COLOURS)]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in (at(x, y) for x, y in points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>'
                     f'<line x1="{right + 14}" y1="{TOP + 8 + 20 * i}" x2="{right + 34}" y2="{TOP + 8 + 20 * i}" '
                     f'stroke="{colour}" stroke-width="3"/>'
                     f'<text x="{right + 40}" y="{TOP + 12 + 20 * i}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
