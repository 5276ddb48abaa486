"""The page in its real process, over a real ledger, asked as a browser asks."""

from __future__ import annotations

import html
import http.client
import json
import re
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import pytest

from daemon.config.loading import parse
from daemon.core.jobs import JobStatus
from daemon.server.guard import WRONG_TOKEN_SECONDS
from daemon.server.page.images import Images
from daemon.server.page.rendering import Renderer
from tests.daemon.search.test_duplicates import at, keep
from tests.daemon.server.site import Site
from tests.daemon_process import SLACK_SECONDS, wait_for
from tests.faults.load import slow_clients

LONG = "9" * 5_000  # Python refuses to read so many digits as a number
EVIL = "<script>alert('x')</script>\"&.jpg"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with closing(Site(tmp_path_factory.mktemp("page"))) as opened:
        for number in range(60):
            opened.place.add(f"{number}.jpg", f"word number{number}")
        opened.place.add(EVIL, "<b>bold</b>", size=9)
        opened.place.add("bad.jpg")
        yield opened


def test_the_newest_images_come_first_and_more_follow(site: Site) -> None:
    first = site.read("/")
    assert first.count('<article class="card">') == 48
    [following] = re.findall(r'hx-get="(/\?cursor=[^"]+)"', first)
    rest = site.read(html.unescape(following), HX_Request="true")
    assert rest.count('<article class="card">') == 62 - 48
    assert "<html" not in rest
    assert "cursor=" not in rest
    assert "No image" not in site.read("/?cursor=1", HX_Request="true"), "the last page was exactly full"


def test_the_newest_images_stand_below_their_days_and_each_day_is_named_once(site: Site) -> None:
    first = site.read("/")
    [day] = re.findall(r'<time datetime="([-0-9]+)">\w+day, \d+ \w+ \d{4}</time>', first)
    following = html.unescape(re.findall('href="([^"]*cursor=[^"]*)"', first)[0])
    assert f"day={day}" in following
    assert "<time" not in site.read(following)
    assert "<time" in site.read(following.replace(day, "2026-01-01"))
    assert "<time" not in site.read("/?q=word"), "best first"


def test_words_and_filters_choose(site: Site) -> None:
    assert '/images/8"' in site.read("/?q=number7")
    assert site.read("/?q=number7").count('<article class="card">') == 1
    assert "No image fits." in site.read("/?q=number7&state=failed")
    assert "there is no foo:" in site.read("/?q=foo:bar")
    assert site.read("/?q=state:failed").count('<article class="card">') == 1


def test_a_card_says_why_its_image_was_found_and_marks_the_words(site: Site) -> None:
    site.place.add("litter/kitten.jpg", "much text before it " * 40 + "Kätzchen <i>")
    content = site.read("/?q=katzchen&by=words")
    assert "Has the words in its text." in content
    assert "<mark>Kätzchen</mark> &lt;i&gt;" in content
    assert "before it …" not in content
    assert "Has the words in its name." in site.read("/?q=kitten")
    assert "<mark>kitten</mark>.jpg" in site.read("/?q=name:kitten&by=newest")
    assert "Has the words in its folder." in site.read("/?q=litter")
    assert '>in </span><bdi dir="ltr"><mark>litter</mark></bdi>' in site.read("/?q=litter")
    assert "Has the words in its reason." in site.read("/?q=truncated&state=failed&by=words")
    assert "Has the words" not in site.read("/?bin=A")


def test_what_disagrees_most_comes_first_with_what_it_is_and_its_neighbors_follow(site: Site) -> None:
    for number, similarity in enumerate((0.99, 0.05)):
        answer = {"text": "a dog", "similarity": similarity}
        site.place.add(f"doubtful{number}.jpg", "doubtful", blip=answer)
    order = "q=doubtful&by=disagreement:scores:blip"
    content = site.read(f"/?{order}")
    first, second = re.findall(r'<h2 class="name"><a href="/images/(\d+)"', content)
    assert int(first) == int(second) + 1, "the newer one is less sure"
    assert "Low scores: caption, 0.95." in content
    assert "what disagrees most first" in content
    assert f'/images/{second}?q=doubtful&amp;by=disagreement%3Ascores%3Ablip" rel="next"' in site.read(
        f"/images/{first}?{order}"
    )


def test_groups_of_near_duplicates_are_side_by_side_the_best_first(tmp_path: Path) -> None:
    with closing(Site(tmp_path, settings='[page]\nroot_path = "/below"\n')) as site:
        assert "No groups are kept yet." in site.read("/duplicates")
        for number, degrees in enumerate((0, 1, 90, 91, 45)):
            site.place.add(f"{number}.jpg", f"word{number}", size=9 - number, clip=at(degrees))
        keep(site.place)
        content = site.read("/duplicates")
        assert re.findall(r'href="/below/images/(\d)"', content)[::2] == ["1", "2", "3", "4"]
        assert "2 groups: of 5 images 2 are near a better one" in content
        assert content.count("Nearness 1.00") == 2, "only the others have one"
        assert content.count('<article class="card">') == 4
        site.place.add("new.jpg", "word", clip=at(45))
        assert "3 groups: of 6 images 3 are near a better one" in site.read("/duplicates")
        assert site.read("/?group=others").count('<article class="card">') == 3
        assert "write group:best" in site.read("/?group=all")
        assert '/below/?q=group%3A1">2 near-duplicates, with this one' in site.read("/images/1")
        site.place.add("other.jpg", "word", clip=at(180))
        assert "near-duplicates, with" not in site.read("/images/7")
        assert "another model of the stage clip" not in site.read("/duplicates")
        site.place.begin_with("clip-2", "clip")
        site.place.add("later.jpg", "word", clip=at(45))
        assert "another model of the stage clip" in site.read("/duplicates")


def test_a_large_group_says_how_many_images_it_has_and_leads_to_all_of_them(tmp_path: Path) -> None:
    with closing(Site(tmp_path)) as site:
        for number in range(25):
            site.place.add(f"{number}.jpg", "word", size=99 - number, clip=at(0))
        keep(site.place)
        content = site.read("/duplicates")
        assert "Group 1: 25 images, the best first" in content
        all_of_them = re.search(r'Only the first 24 are shown here: <a href="(.*)">all of them', content)
        assert all_of_them
        assert site.read(all_of_them[1]).count('<article class="card">') == 25


def test_the_bins_of_a_large_ledger_are_not_listed_for_each_request(tmp_path: Path) -> None:
    class SlowReader:
        lists = 0

        def bins(self) -> list[str]:
            self.lists += 1
            time.sleep(0.1)  # then not for ten seconds
            return ["B", "", "A"]

        def inboxes(self) -> dict[int, bytes]:
            return {1: b"/srv/inbox"}

    reader, nobody = SlowReader(), cast(Any, None)
    config = parse({}, tmp_path)
    images = Images(config, cast(Any, reader), nobody, nobody, Renderer(config))
    assert [images._choices()["bins"] for _ in range(9)] == [["A", "B"]] * 9
    assert reader.lists == 1
    images._bins_until = time.monotonic()
    assert images._choices()["bins"] == ["A", "B"]
    assert reader.lists == 2


def test_names_and_texts_never_become_markup(site: Site) -> None:
    for path in ("/", "/images/61", f"/?q={quote('<script>')}", f"/?bin={quote(EVIL)}"):
        content = site.read(path)
        assert "<script>alert" not in content
        assert "<b>bold" not in content
        assert not re.search(r"<script(?! src=\"/static/)", content)


def test_a_name_cannot_be_written_to_look_like_another(site: Site) -> None:
    site.place.add("holiday\u202egpj.exe", "turned")
    [image] = site.place.find("turned")
    for path in ("/?q=turned", f"/images/{image}"):
        assert "holiday\\u202egpj.exe" in site.read(path)
        assert "\u202e" not in site.read(path)


def test_every_answer_allows_a_browser_only_what_the_page_needs(site: Site) -> None:
    for path in ("/", "/login", "/static/page.css", "/images/999", "/pictures/1/x/small"):
        headers = site.ask(path)[2]
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"


def test_an_image_shows_all_that_is_known_of_it(site: Site) -> None:
    content = site.read("/images/8")
    for words in ("number7", "Why bin", "Time of each stage", "result.json"):
        assert words in content
    assert json.loads(site.read("/images/8/result.json"))["id"] == 8
    assert site.ask("/images/999")[0] == 404


def test_an_image_whose_file_is_gone_has_a_placeholder(site: Site) -> None:
    status, content, headers = site.ask("/pictures/1/x/small")
    assert (status, headers["content-type"]) == (200, "image/svg+xml")
    assert "No picture: the file is no" in content


def test_results_of_demonstration_models_are_shown_with_the_command_that_replaces_them(
    tmp_path: Path,
) -> None:
    with closing(Site(tmp_path)) as opened:
        opened.place.begin_with("model", "clip", "a demonstration")
        opened.place.add("a.jpg", "word")
        # A search that comes while the index is brought up to date does not wait for that.
        wait_for(lambda: "a.jpg" in opened.read("/?q=word"), "the image in the index")
        for address in ("/", "/?q=word", "/images/1"):
            assert (
                f"for real images: <code>visiond setup --config {tmp_path}/daemon.toml</code>"
                in opened.read(address)
            )
        assert "real images" not in opened.read("/?q=nothing")


def test_what_cannot_be_understood_is_explained_in_the_page(site: Site) -> None:
    for query in (
        "before=9999-12-31",
        "q=a%00b",
        "cursor=x",
        f"cursor={10**20}",
        f"cursor={LONG}",
        "by=meaning&q=word",
        f"q={'w+' * 99}",
    ):
        assert "<form" in site.read(f"/?{query}")
    assert site.ask(f"/images/{10**20}")[0] == 404
    assert site.ask(f"/events?after={10**20}")[0] == 409
    assert [site.ask(f"/events?after={text}")[0] for text in ("abc", "-5", "1.5")] == [400] * 3
    assert site.ask("/events?from=0")[0] == 400
    assert site.ask("/live?newest=abc")[0] == 200
    for path in (
        f"/images/{LONG}",
        f"/images/{LONG}/like",
        f"/images/{LONG}/result.json",
        f"/pictures/{LONG}/x/small",
    ):
        assert site.ask(path)[0] == 404
    assert site.ask(f"/events?after={LONG}")[0] == 409
    assert site.ask(f"/live?newest={LONG}")[0] == 200
    assert site.ask("/images/again", "POST", f"id={LONG}", Cookie=site.log_in(), Origin=site.origin)[0] == 303
    assert "truncated" in site.read("/?q=state:failed+%22bad&state=failed")


@pytest.mark.parametrize("change", ["criteria = x'ff'", "finished_at = 1e300"])
def test_a_damaged_row_hides_no_other_image(site: Site, change: str) -> None:
    [image] = site.place.find("name:49.jpg")
    site.place.damage(image, change)
    assert site.read("/?q=word&by=newest").count('<article class="card">') == 48
    assert site.ask(f"/images/{image}")[0] == 200
    assert site.ask(f"/images/{image}/result.json")[0] == 503


def test_a_browser_gets_the_reason_of_a_refusal_as_html_and_a_program_in_one_line(site: Site) -> None:
    for address, sentence in (
        ("/events?foo=1", "/events has no parameter foo: those that it takes are after."),
        ("/images/9999/result.json", "There is no image 9999."),
        ("/nowhere", "There is no address /nowhere."),
    ):
        for accept in ("text/event-stream", "*/*"):
            status, content, headers = site.ask(address, Accept=accept)
            assert (status, content) == (400 if "events" in address else 404, f"{sentence}\n")
            assert headers["content-type"] == "text/plain; charset=utf-8"
        for asked in ({"Accept": "text/html,*/*;q=0.8"}, {"HX-Request": "true", "Accept": "*/*"}):
            assert site.ask(address, **asked)[2]["content-type"] == "text/html; charset=utf-8"


def test_other_names_for_this_machine_are_refused(site: Site) -> None:
    """A site of someone else's whose name leads to this machine must not read the page."""
    assert site.ask("/", Host="evil.example")[0] == 400


def test_a_change_needs_the_token_and_the_page_itself(site: Site) -> None:
    cookie, evil = site.log_in(), "http://evil.example"
    site.place.add("failed.jpg")
    [image] = site.place.find("state:failed name:failed.jpg")
    path = f"/images/{image}/again"
    assert site.ask(path, "POST", "", Origin=site.origin)[0] == 401
    assert site.ask(path, "POST", "", Cookie=cookie, Origin=evil)[0] == 403
    assert site.ask(path, "POST", "", Cookie=cookie)[0] == 403
    assert site.ask(path, "POST", "", Cookie="visiond=wrong", Origin=site.origin)[0] == 401
    assert (
        site.ask("/login", "POST", "token=wrong", Origin=site.origin)[2]["location"]
        == "/login?wrong=1&to=%2F"
    )
    assert site.place.reader.find_numbers([image])[0].status is JobStatus.FAILED
    assert "<button>Retry</button>" in site.read(f"/images/{image}", Cookie=cookie)
    assert "Retry the ticked" not in site.read("/?q=state:failed")


def test_a_form_that_is_too_large_is_refused_before_all_of_it_is_read(site: Site) -> None:
    form = "token=wrong&to=/" + "x" * (1 << 20)
    assert site.ask("/login", "POST", form, Origin=site.origin)[0] == 413
    assert site.ask("/images/again", "POST", form, Cookie=site.log_in(), Origin=site.origin)[0] == 413


def test_where_others_can_reach_the_page_reading_needs_the_token(tmp_path: Path) -> None:
    with closing(Site(tmp_path, "--listen", "0.0.0.0:0")) as opened:
        status, _, headers = opened.ask("/", Accept="text/html")
        assert (status, headers["location"]) == (303, "/login")
        assert opened.ask("/images/1")[0] == 401
        assert opened.ask("/", Cookie=opened.log_in())[0] == 200


def test_failed_images_are_tried_again(site: Site) -> None:
    site.place.add("again.jpg")
    [image] = site.place.find("state:failed name:again.jpg")
    status, _, headers = site.ask(
        "/images/again?state=failed", "POST", f"id={image}", Cookie=site.log_in(), Origin=site.origin
    )
    assert (status, headers["location"]) == (303, "/?state=failed&queued=1")
    assert site.place.find("name:again.jpg") == []


def test_a_wrong_token_beside_a_good_cookie_changes_nothing(site: Site) -> None:
    cookie = site.log_in()
    for origin in ("http://evil.example", site.origin):
        headers = {"Cookie": cookie, "Origin": origin, "Authorization": "Bearer wrong"}
        assert site.ask("/images/8/again", "POST", "", **headers)[0] == 401


def test_whoever_tries_tokens_waits(site: Site) -> None:
    for path, body, headers in (
        ("/images/8/again", "", {"Authorization": "Bearer wrong"}),
        ("/login", "token=wrong", {"Origin": site.origin}),
    ):
        started = time.monotonic()
        site.ask(path, "POST", body, **headers)
        assert time.monotonic() - started >= WRONG_TOKEN_SECONDS
    started = time.monotonic()
    site.log_in()
    assert time.monotonic() - started < WRONG_TOKEN_SECONDS + SLACK_SECONDS


def test_programs_send_the_token_themselves(site: Site) -> None:
    token = (site.place.state / "page.token").read_text().strip()
    assert site.ask("/images/8/again", "POST", "", Authorization=f"Bearer {token}x")[0] == 401
    assert site.ask("/images/8/again", "POST", "", Authorization=f"Bearer {token}")[0] == 303


def test_events_go_on_behind_a_number(site: Site) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", site.port, timeout=60)) as connection:
        connection.request("GET", "/events?after=0", headers={"Last-Event-ID": "57"})
        answer = connection.getresponse()
        assert answer.readline().startswith(b":")
        lines = [answer.readline().decode() for _ in range(4)]
    assert lines[1] == "id: 58\n"
    assert json.loads(lines[2].removeprefix("data: "))["path"] == "57.jpg"


def test_half_requests_and_streams_of_events_do_not_keep_others_out(site: Site) -> None:
    with slow_clients(site.port, 530, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"):
        assert site.ask("/state")[0] == 200
    follow = b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with slow_clients(site.port, 530, follow):
        assert site.ask("/state")[0] == 200


def test_the_state_and_the_settings_are_shown(site: Site) -> None:
    assert "No daemon is running" in site.read("/live")
    assert "done" in site.read("/state")
    assert "max_attempts" in site.read("/settings")
