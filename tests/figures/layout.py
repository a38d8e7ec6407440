"""Where the texts of a figure lie."""


def on_the_page(figure, parts):
    """The boxes of texts or legends, which must lie on the page."""
    boxes = [part.get_window_extent() for part in parts]
    for box in boxes:
        assert figure.bbox.x0 <= box.x0 <= box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0 <= box.y1 <= figure.bbox.y1
    return boxes


def check_layout(figure, min_texts):
    """No text leaves the page or covers another one."""
    texts = [figure._suptitle]
    for axis in figure.axes:
        texts += [*axis.texts, axis._left_title, axis.xaxis.label, axis.yaxis.label]
        texts += [*axis.get_xticklabels(), *axis.get_yticklabels()]
    boxes = on_the_page(figure, [text for text in texts if text.get_text() and text.get_visible()])
    assert len(boxes) > min_texts
    for place, box in enumerate(boxes):
        assert not any(
            min(box.x1, other.x1) - max(box.x0, other.x0) > 1 and min(box.y1, other.y1) - max(box.y0, other.y0) > 1
            for other in boxes[:place]
        )
