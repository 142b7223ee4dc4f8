r"""Answers of the kinds that once earned or lost points wrongly, through the rewards of training and evaluation.

The kinds: letters after a number, which are variables; numbers beyond the range of floating point; one unit in several
spellings; complex numbers; spaces in matrices and numbers; named values; sets against lists, intervals and
inequalities.

Not covered: what the documentation lists (test_documented_answers.py).
"""

import pytest

from verl_clipx.papers.tasks.math.reward import compute_score, compute_score_for_evaluation

# right answer @ box @ training @ evaluation
ROWS = r"""
a+2d @ a+2 @ 0 @ 0
3h @ 3 @ 0 @ 0
2m @ 2 @ 0 @ 0
2 @ 2m @ 0 @ 0
2ab @ 2 @ 0 @ 0
1+2t @ 3 @ 0 @ 0
\frac13\pi r^2h @ \frac13\pi r^2 @ 0 @ 0
7 @ 7d @ 0 @ 0
x+2m @ 2m+x @ 1 @ 1
2ab @ 2ba @ 1 @ 1
\frac{m}{2} @ \frac12 m @ 1 @ 1
3s @ 3 @ 0 @ 0
3 @ 3s @ 0 @ 0
4l @ 4 @ 0 @ 0
4o @ 4 @ 0 @ 0
5g @ 5 @ 0 @ 0
5c @ 5 @ 0 @ 0
5 @ 5c @ 0 @ 0
2bc @ 2 @ 0 @ 0
2cm @ 2 @ 0 @ 0
2 @ 2cm @ 0 @ 0
6ft @ 6 @ 0 @ 0
\frac{1}{2}bc @ \frac12 @ 0 @ 0
\sqrt{2}s @ \sqrt2 @ 0 @ 0
\pi r l @ \pi r @ 0 @ 0
s\sqrt{3} @ \sqrt3 s @ 1 @ 1
2cab @ 2abc @ 1 @ 1
x^2 t @ t x^2 @ 1 @ 1
2 m @ 2 @ 0 @ 0
a+d @ d+a @ 1 @ 1
5 @ 5 kg @ 0 @ 0
5\text{ kg} @ 5 kg @ 1 @ 1
5\text{ cm} @ 5 cm @ 1 @ 1
5\text{ cm} @ 5cm @ 1 @ 1
5\mathrm{cm} @ 5 @ 1 @ 1
5\sqrt{2}\text{ cm} @ 5\sqrt2 @ 1 @ 1
5\sqrt{2}\text{ cm} @ 5\sqrt2 cm @ 1 @ 1
5\sqrt{2}\text{ cm} @ 5\sqrt2\text{ m} @ 1 @ 0
3\mathrm{i} @ 3 @ 0 @ 0
3 @ 3\mathrm{i} @ 0 @ 0
3 @ 3\text{i} @ 0 @ 0
3i @ 3\mathrm{i} @ 1 @ 1
2 @ 2\mathbf{i} @ 0 @ 0
2 @ 2\mathit{x} @ 0 @ 0
2 @ 2\mathrm{e} @ 0 @ 0
\mathrm{e}^2 @ e^2 @ 1 @ 1
36 @ 36 dollars @ 1 @ 1
5 @ 5 degrees @ 1 @ 1
10 @ 10 inches @ 1 @ 1
2^{2024} @ 4^{1012} @ 1 @ 1
2^{2024} @ 4^{1013} @ 0 @ 0
2^{2024} @ 2^{2024}+1 @ 0 @ 0
2^{2024} @ 2^{2023} @ 0 @ 0
\frac{3^{2020}-1}{2} @ \frac12(3^{2020}-1) @ 1 @ 1
\frac{3^{2020}-1}{2} @ \frac12(3^{2020}+1) @ 0 @ 0
200! @ 200\cdot199! @ 1 @ 1
200! @ 199\cdot199! @ 0 @ 0
200! @ 200!+1 @ 0 @ 0
\frac{1}{2^{2024}} @ 4^{-1012} @ 1 @ 1
\frac{1}{2^{2024}} @ 4^{-1013} @ 0 @ 0
\frac{300!}{2} @ 150\cdot 299! @ 1 @ 1
2^{2024}\sqrt{2} @ 4^{1012}\sqrt2 @ 1 @ 1
2^{2024}\sqrt{2} @ 4^{1012}\sqrt3 @ 0 @ 0
2^{2024}\pi @ 4^{1012}\pi @ 1 @ 1
2^{2024}x @ 4^{1012}x @ 1 @ 1
2^{2024}x @ 4^{1011}x @ 0 @ 0
\frac{2^{2024}}{3^{1500}} @ \frac{4^{1012}}{9^{750}} @ 1 @ 1
-2^{1500} @ -4^{750} @ 1 @ 1
2^{1500}i @ 4^{750}i @ 1 @ 1
10^{400} @ 100^{200} @ 1 @ 1
10^{400}+1 @ 100^{200} @ 0 @ 0
12\text{ cm}^2 @ 12\text{ cm}^{2} @ 1 @ 1
12\text{ cm}^2 @ 12\text{ cm}^3 @ 1 @ 0
\$36 @ 36\text{ dollars} @ 1 @ 1
36\text{ dollars} @ \$36 @ 1 @ 1
9.8 @ 9.8\,\text{m}/\text{s}^2 @ 1 @ 1
9.8\text{ m/s}^2 @ 9.8\,\text{m}/\text{s}^2 @ 1 @ 1
9.8\text{ m/s}^2 @ 9.8\,\frac{\text{m}}{\text{s}^2} @ 1 @ 1
9.8\text{ m/s}^2 @ 9.8\text{ m s}^{-2} @ 1 @ 1
12\text{ cm}^2 @ 12\text{ square centimeters} @ 1 @ 1
12\text{ cm}^2 @ 12\text{ cm}\cdot\text{cm} @ 1 @ 0
5\text{ meters} @ 5\text{ m} @ 1 @ 1
5\text{ hours} @ 5\text{ h} @ 1 @ 1
5\text{ hour} @ 5\text{ hours} @ 1 @ 1
60\text{ km/h} @ 60\text{ km}/\text{h} @ 1 @ 1
60\text{ km/h} @ 60\text{ kilometers per hour} @ 1 @ 1
90^\circ @ 90\text{ degrees} @ 1 @ 1
25^\circ\text{C} @ 25^\circ C @ 1 @ 1
25^\circ\text{C} @ 25 @ 1 @ 1
0.5 @ 50\text{ percent} @ 1 @ 1
50\% @ 50\text{ percent} @ 1 @ 1
50\% @ 50 percent @ 1 @ 1
2+2i @ 2(1+i) @ 1 @ 1
2+2i @ 2(1-i) @ 0 @ 0
\frac{1-i}2 @ \frac1{1+i} @ 1 @ 1
\frac{1-i}2 @ \frac1{1-i} @ 0 @ 0
-1 @ i^2 @ 1 @ 1
1 @ i^2 @ 0 @ 0
-1 @ e^{i\pi} @ 1 @ 1
\pm i @ i,-i @ 1 @ 1
1+i @ \sqrt2 e^{i\pi/4} @ 1 @ 1
1+i @ 1-i @ 0 @ 0
x=1+i @ 1+i @ 1 @ 1
x=1+i @ x=i+1 @ 1 @ 1
a+bi @ bi+a @ 1 @ 1
2i @ (1+i)^2 @ 1 @ 1
\{1+i,1-i\} @ 1-i,1+i @ 1 @ 1
\begin{pmatrix}1\\2\end{pmatrix} @ \begin{pmatrix}1\\[4pt]2\end{pmatrix} @ 1 @ 1
\begin{pmatrix}1\\2\end{pmatrix} @ \begin{pmatrix}1\\[0.5em] 2\end{pmatrix} @ 1 @ 1
\begin{pmatrix}1\\2\end{pmatrix} @ \begin{pmatrix}1\\[4pt]3\end{pmatrix} @ 0 @ 0
5 @ f(2)=5 @ 1 @ 1
5 @ f(2)=6 @ 0 @ 0
f(2)=5 @ 5 @ 1 @ 1
5 @ \gcd(10,15)=5 @ 1 @ 1
6 @ \gcd(10,15)=6 @ 0 @ 0
5 @ \gcd(10,15)=6 @ 0 @ 0
2.5 @ f(2)=2.5 @ 1 @ 1
5 @ P(3)=5 @ 1 @ 1
\frac12 @ P(A)=\frac12 @ 1 @ 1
5 @ f(g(2))=5 @ 1 @ 1
5 @ f'(2)=5 @ 1 @ 1
5 @ f^{-1}(2)=5 @ 1 @ 1
5 @ a_{10}=5 @ 1 @ 1
5 @ \max(2,5)=5 @ 1 @ 1
5 @ \text{Area}=5 @ 1 @ 1
60 @ \angle ABC=60 @ 1 @ 1
60 @ \angle ABC=60^\circ @ 1 @ 1
5 @ |AB|=5 @ 1 @ 1
\sqrt{5} @ |z|=\sqrt5 @ 1 @ 1
(1,2) @ (x,y)=(1,2) @ 1 @ 1
5 @ x^2=5 @ 1 @ 0
5 @ 2+3=5 @ 1 @ 0
(1,2),(3,4) @ \{(1,2),(3,4)\} @ 1 @ 1
\{(1,2),(3,4)\} @ (3,4),(1,2) @ 1 @ 1
(1,2),(3,4) @ \{(1,2),(4,3)\} @ 0 @ 0
(1,2),(3,4) @ \{(1,2)\} @ 0 @ 0
(1,2) @ \{1,2\} @ 1 @ 0
\{(1,2,3),(4,5,6)\} @ (1,2,3),(4,5,6) @ 1 @ 1
\mathbb R @ (-\infty,\infty) @ 1 @ 1
\mathbb{R} @ x\in\mathbb R @ 1 @ 1
\mathbb{R} @ (0,\infty) @ 0 @ 0
(-\infty,\infty) @ \mathbb{R} @ 1 @ 1
(-\infty,+\infty) @ \mathbb{R} @ 1 @ 1
\mathbb{R} @ (-\infty,+\infty) @ 1 @ 1
\mathbb{R} @ -\infty<x<\infty @ 1 @ 1
(-\infty,0)\cup(0,\infty) @ \mathbb{R}\setminus\{0\} @ 1 @ 1
(-\infty,0)\cup(0,\infty) @ x\ne 0 @ 1 @ 1
(-\infty,3)\cup(5,\infty) @ x<3\text{ or }x>5 @ 1 @ 1
(-\infty,3)\cup(5,\infty) @ x<3 \lor x>5 @ 1 @ 1
(-\infty,3)\cup(5,\infty) @ x<3 or x>5 @ 1 @ 1
(-\infty,3)\cup(5,\infty) @ x\le3\text{ or }x>5 @ 0 @ 0
(-\infty,3)\cup(5,\infty) @ x<3\text{ or }x>6 @ 0 @ 0
(-\infty,3)\cup(5,\infty) @ x<3 @ 0 @ 0
x<3\text{ or }x>5 @ (-\infty,3)\cup(5,\infty) @ 1 @ 1
x<3\text{ or }x>5 @ x>5\text{ or }x<3 @ 1 @ 1
x<3\text{ or }x>5 @ x>5 @ 0 @ 0
x>5 @ x<3\text{ or }x>5 @ 0 @ 0
(-\infty,-2]\cup[2,\infty) @ x\le -2\text{ or }x\ge 2 @ 1 @ 1
(-\infty,3)\cup(5,7) @ x<3\text{ or }5<x<7 @ 1 @ 1
(3,5) @ x>3\text{ and }x<5 @ 1 @ 1
(-\infty,3)\cup(5,\infty) @ x>5, x<3 @ 0 @ 0
(-\infty,3)\cup(5,\infty) @ (5,\infty)\cup(-\infty,3) @ 1 @ 1
(-\infty,3)\cup(5,\infty) @ x\in(-\infty,3)\cup(5,\infty) @ 1 @ 1
10000 @ 10 000 @ 1 @ 1
10000 @ 10\ 000 @ 1 @ 1
10000 @ 10~000 @ 1 @ 1
10000 @ 10\;000 @ 1 @ 1
10000 @ 10\:000 @ 1 @ 1
10000 @ 10{,}000 @ 1 @ 1
10000 @ 10\,000 @ 1 @ 1
1234567 @ 1 234 567 @ 1 @ 1
1234567 @ 1\ 234\ 567 @ 1 @ 1
1234567 @ 1\;234\;568 @ 0 @ 0
10 @ 10 000 @ 0 @ 0
10000 @ 10 00 @ 0 @ 0
12345.5 @ 12\ 345.5 @ 1 @ 1
12345 @ 12\thinspace345 @ 1 @ 1
12345 @ 12{\,}345 @ 1 @ 1
12345 @ 12\>345 @ 1 @ 1
12345x @ 12\,345x @ 1 @ 1
1,000 @ 1000 @ 1 @ 1
10000\pi @ 10\ 000\pi @ 1 @ 1
\$12,000 @ \$12\,000 @ 1 @ 1
12000\text{ m} @ 12\,000\text{ m} @ 1 @ 1
(-\infty,3)\cup(5,\infty) @ x<3 \cup x>5 @ 1 @ 1
(-\infty,3)\cup(5,\infty) @ x<3 \lor x\ge5 @ 0 @ 0
\mathbb{R}\setminus\{3\} @ x<3\text{ or }x>3 @ 1 @ 1
\mathbb{R}\setminus\{3\} @ x \neq 3 @ 1 @ 1
(-\infty,2)\cup(2,\infty) @ \mathbb{R}\setminus\{3\} @ 0 @ 0
[0,\infty) @ x\geq 0 @ 1 @ 1
5 @ x=5\text{ or }x=6 @ 0 @ 0
5,6 @ x=5\text{ or }x=6 @ 1 @ 1
5,6 @ 5\text{ or }6 @ 1 @ 1
(1,100) @ (1, 100) @ 1 @ 1
\{1,200\} @ \{1, 200\} @ 1 @ 1
(10, 200) @ (10,200) @ 1 @ 1
x^2 000 @ x^2 @ 0 @ 0
1 100/300 @ 4/3 @ 1 @ 1
3 @ 3\mathrm{m} @ 1 @ 1
\frac{x}{2} @ \frac12 x @ 1 @ 1
3\sqrt{2} @ 3\sqrt2\text{ cm} @ 1 @ 1
3\sqrt{2} @ 3\sqrt2\,\mathrm{cm}^2 @ 1 @ 1
x @ x\text{ cm} @ 1 @ 1
\pi r^2 @ r^2\pi @ 1 @ 1
2hl @ 2lh @ 1 @ 1
2cd @ 2c @ 0 @ 0
3ab @ 3 @ 0 @ 0
3 @ 3ab @ 0 @ 0
4st @ 4 @ 0 @ 0
4 @ 4st @ 0 @ 0
4th @ 4 @ 0 @ 0
2pm @ 2 @ 0 @ 0
2mm @ 2 @ 0 @ 0
2m^2 @ 2mm @ 1 @ 1
n+2d @ n+2 @ 0 @ 0
a+(n-1)d @ a+(n-1) @ 0 @ 0
\frac{s}{2} @ \frac12 @ 0 @ 0
(x+1)t @ x+1 @ 0 @ 0
2^t @ 2 @ 0 @ 0
e^{t} @ e @ 0 @ 0
\$1,234.50 @ 1234.5 @ 1 @ 1
\$1234.50 @ 1234.50\text{ USD} @ 1 @ 1
5\text{ euros} @ 5 @ 1 @ 1
\$5 @ 5\text{ euros} @ 1 @ 0
5\% @ 0.05 @ 1 @ 1
5\% @ 5 @ 1 @ 0
90^\circ @ 90 @ 1 @ 1
90^\circ @ 91^\circ @ 0 @ 0
\frac{\pi}{2} @ 90^\circ @ 0 @ 0
12\text{ km} @ 12\text{ kilometers} @ 1 @ 1
12\text{ km} @ 12000\text{ m} @ 0 @ 0
50\text{ mph} @ 50\text{ miles per hour} @ 1 @ 1
5\text{ m}^3 @ 5\text{ cubic meters} @ 1 @ 1
5\text{ m}^3 @ 5\text{ m}^2 @ 1 @ 0
5\text{ units}^2 @ 5\text{ square units} @ 1 @ 1
3\text{ N}\cdot\text{m} @ 3\text{ N m} @ 1 @ 1
3 @ 3\text{ N}\cdot\text{m} @ 1 @ 1
3 @ 3\ \Omega @ 0 @ 0
3+4i @ 4i+3 @ 1 @ 1
5e^{i\pi/2} @ 5i @ 1 @ 1
-i @ \frac1i @ 1 @ 1
i @ \frac1i @ 0 @ 0
(1+i)(1-i) @ 2 @ 1 @ 1
\frac{1}{2}+\frac{\sqrt{3}}{2}i @ e^{i\pi/3} @ 1 @ 1
\frac{1}{2}+\frac{\sqrt{3}}{2}i @ e^{-i\pi/3} @ 0 @ 0
i @ -i @ 0 @ 0
z=2i @ 2i @ 1 @ 1
\{i,-i\} @ \pm i @ 1 @ 1
(1,i) @ (1,-i) @ 0 @ 0
2 @ |1+i|^2 @ 1 @ 1
xi @ ix @ 1 @ 1
x_i @ x_j @ 0 @ 0
x_i+1 @ 1+x_i @ 1 @ 1
\text{lcm}(4,6)=12 @ 12 @ 1 @ 1
12 @ \operatorname{lcm}(4,6)=12 @ 1 @ 1
12 @ \text{lcm}(4,6)=12 @ 1 @ 1
\log_2 8=3 @ 3 @ 1 @ 1
3 @ \log_2 8=3 @ 1 @ 1
4 @ \log_2 8=4 @ 0 @ 0
4 @ \max(2,3)=4 @ 0 @ 0
\binom{5}{2} @ 10 @ 1 @ 1
f(x)=x^2 @ x^2 @ 1 @ 1
x^2 @ f(x)=x^2 @ 1 @ 1
x^2 @ f(x)=x^3 @ 0 @ 0
y=2x @ 2x @ 1 @ 1
2x @ y=2x @ 1 @ 1
6 @ 2x=6 @ 1 @ 0
50! @ 50\cdot 49! @ 1 @ 1
\frac{2^{2024}-1}{3} @ \frac{4^{1012}-1}{3} @ 1 @ 1
2^{1025} @ 2\cdot 2^{1024} @ 1 @ 1
2^{1025} @ 2\cdot 2^{1025} @ 0 @ 0
2024^{2024} @ 2024\cdot 2024^{2023} @ 1 @ 1
1-2^{-2000} @ 1-4^{-1000} @ 1 @ 1
1-2^{-2000} @ 1-4^{-1001} @ 0 @ 0
1-2^{-2000} @ 1 @ 0 @ 0
2^{-2000} @ 0 @ 0 @ 0
\frac{1}{300!} @ \frac{1}{300\cdot 299!} @ 1 @ 1
2^{2024}+\sqrt2 @ 4^{1012}+\sqrt2 @ 1 @ 1
2^{2024}+\sqrt2 @ 4^{1012}+\sqrt3 @ 0 @ 0
\sqrt{2^{2400}} @ 2^{1200} @ 1 @ 1
2^{3000}\cdot e @ 8^{1000}e @ 1 @ 1
2^{3000}\cdot e @ 8^{1000}\pi @ 0 @ 0
\log_{2}{2^{2024}} @ 2024 @ 1 @ 1
\begin{pmatrix}1&2\\3&4\end{pmatrix} @ \begin{bmatrix}1&2\\[2mm]3&4\end{bmatrix} @ 1 @ 1
\begin{pmatrix}1&2\\3&4\end{pmatrix} @ \begin{pmatrix}1&2\\[1ex]4&3\end{pmatrix} @ 0 @ 0
\begin{pmatrix} 1 \\ 2 \end{pmatrix} @ \begin{pmatrix} 1 \\ [4pt] 2 \end{pmatrix} @ 1 @ 1
1234567 @ 1'234'567 @ 1 @ 1
1234567 @ 1,234,567 @ 1 @ 1
1234567 @ 1\,234\,567 @ 1 @ 1
1234567 @ 1\text{ }234\text{ }567 @ 1 @ 1
1\,000\,000 @ 1000000 @ 1 @ 1
0.123 @ 0.123 @ 1 @ 1
AB=5 @ 5 @ 1 @ 1
x=5 @ y=5 @ 0 @ 0
5\text{ m} @ 5 cm @ 0 @ 0
5\text{ m} @ 5m^2 @ 0 @ 0
5\text{ m}^2 @ 5m^2 @ 1 @ 1
5\text{ m}^2 @ 5 m^{2} @ 1 @ 1
5\text{ m/s} @ 5 m/s @ 1 @ 1
5\text{ m/s} @ 5 s/m @ 0 @ 0
2x\text{ m} @ 2x m @ 1 @ 1
2\text{ m} @ 2 @ 1 @ 1
x+5\text{ cm} @ x+5 @ 1 @ 1
2,000 @ 2 000 @ 1 @ 1
(2,000) @ 2000 @ 0 @ 0
2 000,3 000 @ 2000, 3000 @ 1 @ 1
123 456 @ 123456 @ 1 @ 1
1234 567 @ 1234567 @ 0 @ 0
12 3456 @ 123456 @ 0 @ 0
\frac{10\,000}{3} @ \frac{10000}{3} @ 1 @ 1
2\cdot 10\ 000 @ 20000 @ 1 @ 1
x=10\ 000 @ 10000 @ 1 @ 1
5 @ x = 5 @ 1 @ 1
5 @ 3=5 @ 0 @ 0
5 @ 3x=5 @ 1 @ 0
\frac12 @ P(X\le 3)=\frac12 @ 1 @ 1
5 @ f(1)+f(2)=5 @ 1 @ 0
5 @ f(1)=5, f(2)=6 @ 0 @ 0
5 @ \sqrt{25}=5 @ 1 @ 0
5 @ \sin(3)=5 @ 0 @ 0
\frac12 @ \sin(30)=\frac12 @ 0 @ 0
5 @ gcd(10,15)=5 @ 1 @ 1
6 @ gcd(10,15)=6 @ 0 @ 0
6 @ \mathrm{gcd}(10,15)=6 @ 0 @ 0
6 @ \text{gcd}(10,15)=6 @ 0 @ 0
6 @ \operatorname{gcd}(10,15)=6 @ 0 @ 0
5 @ \operatorname{gcd}(10,15)=5 @ 1 @ 1
5 @ \gcd(a,b)=5 @ 1 @ 1
8 @ \lfloor 7.5 \rfloor=8 @ 0 @ 0
7 @ 3!=7 @ 0 @ 0
7 @ \binom{4}{2}=7 @ 0 @ 0
\mathbb{R} @ [0,\infty) @ 0 @ 0
\mathbb{R} @ \mathbb{Z} @ 0 @ 0
\mathbb{R} @ \emptyset @ 0 @ 0
\mathbb{R} @ \text{all real numbers} @ 1 @ 1
\mathbb{R}^2 @ \mathbb{R} @ 0 @ 0
x<3 @ x<3\text{ and }x<5 @ 1 @ 1
x<3 @ x<3\text{ or }x<5 @ 0 @ 0
(3,5) @ x>3\text{ or }x<5 @ 0 @ 0
\mathbb{R} @ x>3\text{ or }x<5 @ 1 @ 1
(-\infty,3)\cup(5,\infty) @ x<3\text{ and }x>5 @ 0 @ 0
(3,5) @ 3<x\text{ and }x<5 @ 1 @ 1
(-\infty,3]\cup[5,\infty) @ x \leq 3\text{ or }x \geq 5 @ 1 @ 1
(-\infty,3]\cup[5,\infty) @ x \leqslant 3\textrm{ or }x \geqslant 5 @ 1 @ 1
(-\infty,3)\cup(5,\infty) @ y<3\text{ or }y>5 @ 1 @ 1
(-\infty,\sqrt{2})\cup(5,\infty) @ x<\sqrt2\text{ or }x>5 @ 1 @ 1
(-\infty,\sqrt{2})\cup(5,\infty) @ x<\sqrt3\text{ or }x>5 @ 0 @ 0
(1,2)\cup(3,4) @ 1<x<2\text{ or }3<x<4 @ 1 @ 1
(1,2)\cup(3,4) @ 1<x<2, 3<x<4 @ 0 @ 0
(1,2),(3,4) @ (1,2)\cup(3,4) @ 0 @ 0
(1,2),(3,4) @ (2,1),(3,4) @ 0 @ 0
(1,2),(3,4) @ (1,2),(3,4),(5,6) @ 0 @ 0
(1,2),(3,4) @ (1,2)\text{ and }(3,4) @ 1 @ 1
(1,2),(3,4) @ \{(3,4),(1,2)\} @ 1 @ 1
(1,2),(3,4) @ [1,2],[3,4] @ 0 @ 0
(1,2),(3,4) @ 1,2,3,4 @ 0 @ 0
(1,2) @ ((1,2)) @ 1 @ 1
2+2i @ 2-2i @ 0 @ 0
2 @ 2+0i @ 1 @ 1
2+3i @ 2+3j @ 0 @ 0
\frac{3+4i}{5} @ \frac35+\frac45i @ 1 @ 1
\frac{3+4i}{5} @ \frac35-\frac45i @ 0 @ 0
\frac{5}{3-4i} @ \frac{3+4i}{5} @ 1 @ 1
i^3 @ -i @ 1 @ 1
i^{2024} @ 1 @ 1 @ 1
\sqrt{-1} @ i @ 1 @ 1
\sqrt{-4} @ 2i @ 1 @ 1
2\sqrt{3}i @ 2i\sqrt3 @ 1 @ 1
x^2+1 @ (x+i)(x-i) @ 1 @ 1
ki @ ik @ 1 @ 1
x=\pm i @ \pm i @ 1 @ 1
|3+4i| @ 5 @ 1 @ 1
3 @ 3d @ 0 @ 0
3\text{ T} @ 3 @ 1 @ 1
3 @ 3\mathrm{T} @ 1 @ 1
3 @ 3\mathrm{A} @ 1 @ 1
\text{(C)} @ C @ 1 @ 1
C @ \text{C} @ 1 @ 1
5\,\mathrm{kg} @ 5 @ 1 @ 1
5~\mathrm{kg} @ 5\text{kg} @ 1 @ 1
\frac{1}{2}\text{ hour} @ 0.5 @ 1 @ 1
1\text{ hour }30\text{ minutes} @ 90 @ 0 @ 0
5\text{ feet }6\text{ inches} @ 5 @ 0 @ 0
5 @ 5\text{ feet }6\text{ inches} @ 0 @ 0
5 @ 5\text{ dozen} @ 0 @ 0
\$5 @ \$6 @ 0 @ 0
\$5 @ 5\text{ cents} @ 1 @ 0
-\$5 @ -5 @ 1 @ 1
5 @ 5\$ @ 1 @ 1
\$\frac{5}{2} @ \frac52 @ 1 @ 1
\$5\text{ million} @ 5 @ 0 @ 0
180^\circ - x @ 180-x @ 1 @ 1
x^\circ @ x @ 1 @ 1
30^{\circ}, 60^{\circ} @ 30,60 @ 1 @ 1
30^\circ @ 30\degree @ 1 @ 1
2^{2000}-2^{1999} @ 2^{1999} @ 1 @ 1
2^{2000}-2^{1999} @ 2^{1998} @ 0 @ 0
\frac{2^{2000}}{2^{1999}} @ 2 @ 1 @ 1
\frac{2^{2000}}{2^{1999}} @ 3 @ 0 @ 0
3^{1000}\cdot 2^{500} @ 18^{500} @ 1 @ 1
3^{1000}\cdot 2^{500} @ 18^{501} @ 0 @ 0
10^{9999} @ 10\cdot 10^{9998} @ 1 @ 1
\frac{999!}{998!} @ 999 @ 1 @ 1
5 @ 5\text{ or so} @ 0 @ 0
13 @ \text{lcm}(4,6)=13 @ 0 @ 0
13 @ \operatorname{lcm}(4,6)=13 @ 0 @ 0
5 @ \text{gcd}(10,15)=5 @ 1 @ 1
"""


@pytest.mark.parametrize("row", ROWS.strip().splitlines())
def test_an_answer_of_a_kind(row):
    gold, box, training, evaluation = row.split(" @ ")
    response = rf"It is \boxed{{{box}}}."
    assert compute_score("math500", response, gold)["score"] == float(training)
    assert compute_score_for_evaluation("math500", response, gold)["score"] == float(evaluation)


UNITS = [
    "c",
    "d",
    "g",
    "h",
    "l",
    "m",
    "o",
    "s",
    "t",
    "ab",
    "bc",
    "cm",
    "ft",
    "st",
    "th",
    "mm",
    "km",
    "kg",
    "lb",
    "pm",
    "am",
    "cc",
    "mt",
    "lt",
    "sq",
    "gm",
    "hr",
    "yr",
]


@pytest.mark.parametrize("head", ["2", r"\frac{1}{3}", r"\sqrt{5}", "x+3", r"\pi r^{2}", "a+2", "(a+b)"])
@pytest.mark.parametrize("unit", UNITS)
def test_letters_after_an_answer_are_variables(head, unit):
    for score in (compute_score, compute_score_for_evaluation):
        for gold, box in ((head, head + unit), (head + unit, head), (head, f"{head} {unit}")):
            assert score("math500", rf"\boxed{{{box}}}", gold)["score"] == 0.0
        right = rf"\boxed{{2{unit[::-1]}}}"
        assert score("math500", right, f"2{unit}")["score"] == 1.0


def test_a_comparison_that_fails_has_no_verdict():
    from verl_clipx.papers.tasks.math.worker import _answer

    def fail(gold, answer):
        raise OverflowError

    assert _answer(fail, [("1", "2")], False) == b"-\n"
